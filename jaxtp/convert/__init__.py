"""Between folders in Hugging Face format and checkpoints of ours."""
