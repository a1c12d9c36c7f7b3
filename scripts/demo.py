"""Train two tiny hybrid models on the docstrings of your Python, reload them in a fresh process and use them.

    make demo                       first time: train and show; after an interruption: continue; afterwards: show again
    make demo ARGS=--restart        start over

A masked model (four layers of three kinds) and, in miniature, a causal one. Both are trained by the programs anyone
can use, `scripts/run_mlm.py` and `scripts/run_clm.py`, and shown by transformers' own `pipeline()`. Ctrl-C stops after
the current step with a complete checkpoint.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Waiting threads sleep instead of spinning: on a busy machine spinning makes training many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MASKED_SENTENCES = (
    "Return a list [MASK] the names.",
    "Return True if the path [MASK] a directory.",
    "This class is used [MASK] create a new object.",
    "Return the [MASK] of the file.",
)
PROMPTS = ("Return a list of", "This class", "If the file")
# What is usual, so that nobody takes the demo for more than it is (arXiv 1810.04805, appendix A.2).
USUAL = "BERT-base has 110 M parameters and read some 130,000 M tokens."

COMMON = {
    "optim": "frankenstein_adafactor",  # the fastest on this text at this size, docs/optimizer_results.md
    "learning_rate": 0.09,
    "warmup_steps": 0.05,
    "per_device_eval_batch_size": 32,
    "block_size": 128,
    "vocab_size": 2048,
    "save_steps": 100,
    "save_total_limit": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {
        **COMMON,
        "max_steps": 200,
        "per_device_train_batch_size": 16,
        "mask_rate": 0.25,
        "layer_pattern": ["gated_deltanet", "swa", "gated_deltanet", "standard"],
        "mixer_params": {"swa": {"window_size": 32}},
        "config_overrides": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    },
    "causal": {
        **COMMON,
        "max_steps": 240,
        "per_device_train_batch_size": 16,
        "layer_pattern": ["gated_deltanet", "swa"],
        "mixer_params": {"swa": {"window_size": 32}},
        "config_overrides": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    },
}


def finished(kind: str, folder: Path, steps: int | None) -> dict[str, Any] | None:
    """The results of an earlier run with the same settings, if it came to its end."""
    results = folder / "model" / "metrics.json"
    same = _read(folder / "settings.json") == settings_of(kind, steps)
    return _read(results) if same else None


def settings_of(kind: str, steps: int | None) -> dict[str, Any]:
    """The flags of the training program."""
    return {**SETTINGS[kind], **({} if steps is None else {"max_steps": steps})}


def _read(path: Path) -> Any:
    """A file of JSON; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def start_over(folder: Path) -> None:
    """Delete one model of an earlier demo; a folder with anything else is left alone."""
    if not folder.exists():
        return
    if not (folder / "settings.json").is_file():
        raise SystemExit(f"{folder} is not from this demo and stays as it is; choose another --output_dir.")
    shutil.rmtree(folder)


def train(kind: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """Train one of the two models, or continue where an interrupted run stopped."""
    settings, told = settings_of(kind, steps), folder / "settings.json"
    if _read(told) not in (None, settings):
        print(f"{folder} was made with other settings: starting over.")
        start_over(folder)

    import run_clm
    import run_mlm

    from frankenstein_hf.data.atomic import write_json
    from frankenstein_hf.training.arguments import BadInput

    write_json(told, settings)
    flags: list[str] = ["--output_dir", str(folder / "model")]
    for name, value in settings.items():
        flags += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    try:
        return (run_mlm if kind == "masked" else run_clm).main(flags)
    except BadInput as error:
        raise BadInput(f"{error} For the demo: make demo ARGS=--restart") from error


def show(root: Path) -> None:
    """What the fresh process does: load both models as anybody would, and use them."""
    import transformers
    from transformers import pipeline

    import frankenstein_hf  # noqa: F401  (registers the models)

    transformers.logging.disable_progress_bar()
    fill = pipeline("fill-mask", str(root / "masked" / "model"))
    print("The masked model fills gaps; its four best guesses:\n")
    for sentence in MASKED_SENTENCES:
        guesses = fill(sentence, top_k=4)
        shown = ", ".join(f"{guess['token_str'].strip()} ({guess['score']:.0%})" for guess in guesses)
        print(f"  {sentence}\n      {shown}")
    write = pipeline("text-generation", str(root / "causal" / "model"))
    transformers.set_seed(0)
    print("\nThe causal model goes on behind the bar:\n")
    for prompt in PROMPTS:
        text = write(prompt, max_new_tokens=32, do_sample=True, temperature=0.6, top_k=20)[0]["generated_text"]
        print(f"  {prompt} │ {' '.join(text[len(prompt) :].split())}")


def scale(kind: str, metrics: dict[str, Any]) -> str:
    """How large a model and its training were, and what came of it, in sentences."""
    after, unigram = (metrics[key]["loss"] for key in ("after", "unigram"))
    read = metrics["recipe"]["tokens seen"] / 1e6
    return (
        f"  {kind.capitalize()}: {metrics['model']['parameters'] / 1e6:.1f} M parameters, {read:.2f} M tokens read. Of "
        f"held-out text it is now as unsure as among {math.exp(after):,.0f} tokens;\n"
        f"  it began with {metrics['model']['vocab_size']:,}, and knowing only how often each occurs leaves "
        f"{math.exp(unigram):,.0f}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="train again from the beginning")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="where everything is written")
    parser.add_argument("--steps", type=int, help="training steps of each model, for a quicker and worse demo")
    parser.add_argument("--show", action="store_true", help="only load and use the models in --output_dir")
    args = parser.parse_args(argv)
    if args.show:
        return show(args.output_dir)

    start = time.monotonic()
    if args.restart:
        for kind in SETTINGS:
            start_over(args.output_dir / kind)
    earlier = {kind: finished(kind, args.output_dir / kind, args.steps) for kind in SETTINGS}
    if all(earlier.values()):
        print("Trained already; here are the results again (make demo ARGS=--restart trains anew).")
    results = {}
    for kind, title in (("masked", "A masked language model"), ("causal", "A causal language model")):
        if earlier[kind] is None:
            print(f"\n== {title}, {SETTINGS[kind]['max_steps'] if args.steps is None else args.steps} steps")
        results[kind] = earlier[kind] or train(kind, args.output_dir / kind, args.steps)

    print("\n== How large this was")
    for kind in SETTINGS:
        print(scale(kind, results[kind]))
    print(f"  For comparison: {USUAL}")
    print(
        f"  This took {time.monotonic() - start:.0f} s. The models: "
        + ", ".join(str(args.output_dir / kind / "model") for kind in SETTINGS)
    )
    print("  Each folder has weights, tokenizer, code, metrics.json, loss.png and a model card.")
    print("\n== What they say, reloaded in a fresh process", flush=True)
    subprocess.run([sys.executable, __file__, "--show", "--output_dir", str(args.output_dir)], check=True)
    print(
        "\nNext: the same with your text and mixers, scripts/run_clm.py --output_dir out --train_file my.txt (--help)."
    )


if __name__ == "__main__":
    from frankenstein_hf.training.failures import run_main

    run_main(main)
