"""transformers' command line with our models: python examples/serve.py serve outputs/chat --device cpu

The two lines below are all it takes: importing frankenstein_hf makes the server find its models. It answers as OpenAI's
does, at http://localhost:8000/v1/chat/completions (the tokenizer needs a chat template) and /v1/completions, and
`python examples/serve.py chat http://localhost:8000 outputs/chat` talks to it. Needs `transformers[serving]`.
"""

from transformers.cli.transformers import main

import frankenstein_hf  # noqa: F401

if __name__ == "__main__":
    main()
