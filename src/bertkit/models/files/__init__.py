"""Model directories in the Hugging Face format: found, read, written, and their labels."""
