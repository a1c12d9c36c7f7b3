"""The arena: campaigns that compare architectures. So far its statistics; planning and running come with it."""
