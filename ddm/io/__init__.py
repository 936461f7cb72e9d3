"""Files: written whole or not at all; and, where somebody else wrote them, bounded before they are read."""
