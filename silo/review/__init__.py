"""Shows a person everything that would leave with a submission, as text or on a page of this machine."""
