"""Models of transformers' own families become models of this one, and back: exactly, or not at all."""
