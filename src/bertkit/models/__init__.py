"""Encoders and their heads.

encoder.py is the interface of every family, registry.py their list. families/ has one file each, built from layers.py,
attention/ and operators/. headed.py puts heads.py on an encoder; files/ reads and writes it in the Hugging Face format,
with the names of weights.py. conversion/ and quantisation/ change a trained model; scoring/ and decoding/ use one.
sentence.py, feature_lstm.py and vector_decoder.py are built around an encoder.
"""
