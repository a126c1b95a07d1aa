"""Settings, flags, errors, and files that nobody vouches for."""
