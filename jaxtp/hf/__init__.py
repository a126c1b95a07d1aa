"""Models in and out of folders in Hugging Face format."""
