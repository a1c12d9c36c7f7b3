"""The toolkit's part in saving: flattened code and model cards, and keeping both when `Trainer` pushes."""
