"""Fetches releases from web hosts and from the Hugging Face Hub, and pushes them to the Hub."""
