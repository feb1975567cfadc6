"""Work that splits into independent jobs: runs of a suite, blocks of a corpus or of texts.

settings.py names the executors and registry.py finds them. executor.py starts jobs, waits for them, and restarts jobs
whose worker is lost. local.py runs them in processes on this machine, ray_cluster.py on a Ray cluster. manifest.py
records and checks their output files.
"""
