"""What an operator looks at: status, the live page, the doctor."""
