"""Settings, flags, errors, and untrusted files."""
