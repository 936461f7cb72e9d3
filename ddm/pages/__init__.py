"""Draws self-contained pages: fills templates, inlines pictures, and holds the style that all reports share."""
