"""From a model to a :class:`~autostream.ir.Program`, or a refusal with its reason."""
