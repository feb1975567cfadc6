"""Files of object stores: `s3://BUCKET/KEY`, `gs://BUCKET/KEY` and `file:///DIRECTORY`.

Not from a paper; built on fsspec, which only store.py uses. Siblings: url.py parses names, failures.py interprets
errors, fetch.py makes the copies in the cache. bertkit.run.stored handles runs on a store.
"""
