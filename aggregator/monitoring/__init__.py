"""Shows a federation to its operator: status, the live page, the doctor."""
