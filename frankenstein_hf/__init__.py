"""Any sequence mixer in a Hugging Face model, chosen per layer by name."""

from .auto import register

register()
