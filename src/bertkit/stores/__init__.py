"""Files of object stores: `s3://BUCKET/KEY`, `gs://BUCKET/KEY` and `file:///DIRECTORY`.

Own design over fsspec, which only store.py knows. Siblings: url.py is a name, failures.py what its errors mean,
fetch.py the copies in the cache. What runs keep on a store is in bertkit.run.stored.
"""
