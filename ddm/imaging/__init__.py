"""Images as hospitals keep them: decoded within bounds, held against what people must see first, transformed alike."""
