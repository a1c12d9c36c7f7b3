"""Train two small hybrid models on the docstrings of your Python, reload them in a fresh process and use them.

    make demo                       first time: train and show; after an interruption: continue; afterwards: show again
    make demo ARGS=--restart        start over

A masked model (four layers of three kinds) and, in miniature, a causal one. Both are trained by the programs anyone
can use, `scripts/run_mlm.py` and `scripts/run_clm.py`, and shown by transformers' own `pipeline()`. Ctrl-C stops after
the current step with a complete checkpoint.
"""

import argparse
import json
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
    "Return the [MASK] of the file.",
    "If the argument is [MASK], an exception is raised.",
    "This method is called [MASK] the connection is closed.",
)
PROMPTS = ("Return a list of", "This class")

COMMON = {
    "learning_rate": 3e-3,
    "adam_beta2": 0.98,
    "warmup_steps": 0.05,
    "per_device_eval_batch_size": 32,
    "block_size": 128,
    "vocab_size": 4096,
    "save_steps": 100,
    "save_total_limit": 1,
    "logging_steps": 25,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {
        **COMMON,
        "max_steps": 240,
        "per_device_train_batch_size": 16,
        "mask_rate": 0.25,
        "layer_pattern": ["gated_deltanet", "swa", "gated_deltanet", "standard"],
        "mixer_params": {"swa": {"window_size": 32}},
        "config_overrides": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    },
    "causal": {
        **COMMON,
        "max_steps": 150,
        "per_device_train_batch_size": 8,
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
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def train(kind: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """Train one of the two models, or continue where an interrupted run stopped."""
    settings, told = settings_of(kind, steps), folder / "settings.json"
    if _read(told) not in (None, settings):
        print(f"{folder} was made with other settings: starting over.")
        shutil.rmtree(folder)

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


def show(kind: str, folder: Path) -> None:
    """What the fresh process does: load the model as anybody would, and use it."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

    import frankenstein_hf  # noqa: F401  (registers the models)

    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind == "masked":
        fill = pipeline("fill-mask", model=AutoModelForMaskedLM.from_pretrained(folder), tokenizer=tokenizer)
        for sentence in MASKED_SENTENCES:
            guesses = ", ".join(
                f"{guess['token_str'].strip()} ({guess['score']:.0%})" for guess in fill(sentence, top_k=4)
            )
            print(f"  {sentence}\n      {guesses}")
    else:
        write = pipeline("text-generation", model=AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
        transformers.set_seed(0)
        for prompt in PROMPTS:
            text = write(prompt, max_new_tokens=24, do_sample=True, temperature=0.7, top_k=20)[0]["generated_text"]
            print(f"  {prompt}|{' '.join(text[len(prompt) :].split())}")


def summary(name: str, metrics: dict[str, Any]) -> str:
    """One row of the table of losses."""
    before, after, unigram = (metrics[key]["loss"] for key in ("before", "after", "unigram"))
    return f"  {name:24}{before:8.3f}{after:10.3f}{unigram:16.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="train again from the beginning")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="where everything is written")
    parser.add_argument("--steps", type=int, help="training steps of each model, for a quicker and worse demo")
    parser.add_argument("--show", choices=sorted(SETTINGS), help="only load and use the model in --output_dir")
    args = parser.parse_args(argv)
    if args.show:
        return show(args.show, args.output_dir)

    start = time.monotonic()
    if args.restart and args.output_dir.exists():
        for kind in SETTINGS:
            shutil.rmtree(args.output_dir / kind, ignore_errors=True)
    earlier = {kind: finished(kind, args.output_dir / kind, args.steps) for kind in SETTINGS}
    if all(earlier.values()):
        print("Trained already; here are the results again (make demo ARGS=--restart trains anew).")
    results = {}
    for kind, title in (("masked", "A masked language model"), ("causal", "A causal language model, in miniature")):
        print(f"\n== {title}")
        folder = args.output_dir / kind
        results[kind] = earlier[kind] or train(kind, folder, args.steps)
        print("Reloaded in a fresh process:", flush=True)
        command = [sys.executable, __file__, "--show", kind, "--output_dir", str(folder / "model")]
        subprocess.run(command, check=True)
    print("\n== Held-out loss (nats a token; lower is better)")
    print(f"  {'':24}{'before':>8}{'after':>10}{'frequencies':>16}")
    print(summary("masked tokens", results["masked"]))
    print(summary("next tokens", results["causal"]))
    print(f"\nThe models, with tokenizer and code: {args.output_dir}/masked/model and {args.output_dir}/causal/model")
    print(f"Their metrics: metrics.json there. This took {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    from frankenstein_hf.training.programs import run_main

    run_main(main)
