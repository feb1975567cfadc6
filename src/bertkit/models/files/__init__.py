"""Model directories in the Hugging Face format: found, read and written, and what they lack."""
