"""Signs the versions of a release and keeps their log: what an operator and a single owner do alike."""
