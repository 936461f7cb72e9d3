"""Writes networks of students and verified releases for other programs: diffusers, ONNX and torch.export."""
