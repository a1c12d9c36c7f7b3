"""Subcommands that use trained models: generate, predict, embed, compare."""

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..training.failures import BadInput
from .app import CheckFailed, JsonOption, app, show, talk_on_stderr

ModelArgument = Annotated[str, typer.Argument(help="A trained model: a folder, or a name on the Hub.")]
TextsArgument = Annotated[list[str] | None, typer.Argument(help="Texts; without them and --file, lines of stdin.")]
FileOption = Annotated[Path | None, typer.Option("--file", help="A file with a text a line.")]
TrustOption = Annotated[bool, typer.Option(help="Run code that comes with the model.")]


def _texts(given: list[str] | None, file: Path | None) -> list[str]:
    if file is not None and given:
        raise BadInput("give texts or --file, not both.")
    if file is not None:
        if not file.is_file():
            raise BadInput(f"--file {file}: there is no such file.")
        given = file.read_text(encoding="utf-8", errors="replace").splitlines()
    elif not given:
        given = sys.stdin.read().splitlines()
    texts = [text for text in given if text.strip()]
    if not texts:
        raise BadInput("there is no text: give some as arguments, with --file, or on stdin.")
    return texts


def _pipeline(task: Any, model: str, trust: bool) -> Any:
    from transformers import pipeline

    import frankenstein_hf  # noqa: F401  (registers the models)

    from ..training.failures import readable

    return readable(model, lambda: pipeline(task, model=model, trust_remote_code=trust), "MODEL")


def _kind(model: str, trust: bool) -> str:
    """What transformers' pipelines call what the model does."""
    from transformers import AutoConfig

    from ..training.failures import readable

    config = readable(model, lambda: AutoConfig.from_pretrained(model, trust_remote_code=trust), "MODEL")
    heads = {
        "ForMaskedLM": "fill-mask",
        "ForCausalLM": "text-generation",
        "ForSequenceClassification": "text-classification",
        "ForTokenClassification": "token-classification",
    }
    for ending, kind in heads.items():
        if any(name.endswith(ending) for name in config.architectures or ()):
            return kind
    raise BadInput(f"{model} has no head that predicts: {', '.join(config.architectures or ['nothing'])}.")


@app.command()
def generate(
    model: ModelArgument,
    texts: TextsArgument = None,
    file: FileOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 50,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among so many tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue texts with a causal model."""
    prompts = _texts(texts, file)
    if _kind(model, trust_remote_code) != "text-generation":
        raise BadInput(f"{model} does not continue text; `frankenstein predict` uses it.")
    from transformers import set_seed

    with talk_on_stderr():
        write = _pipeline("text-generation", model, trust_remote_code)
        set_seed(seed)
        options: dict[str, Any] = {"do_sample": temperature > 0}
        options |= {"temperature": temperature, "top_k": top_k} if temperature > 0 else {}
        written = [write(prompt, max_new_tokens=max_new_tokens, **options)[0]["generated_text"] for prompt in prompts]
    show([{"prompt": p, "text": t} for p, t in zip(prompts, written)], as_json, "\n".join(written))


@app.command()
def predict(
    model: ModelArgument,
    texts: TextsArgument = None,
    file: FileOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fill masks, or label texts or their words."""
    kind = _kind(model, trust_remote_code)
    if kind == "text-generation":
        raise BadInput(f"{model} continues text; `frankenstein generate` uses it.")
    given = _texts(texts, file)
    with talk_on_stderr():
        use = _pipeline(kind, model, trust_remote_code)
        if kind == "fill-mask" and (lacking := [text for text in given if use.tokenizer.mask_token not in text]):
            raise BadInput(f"write {use.tokenizer.mask_token} where a word is to be found: {lacking[0]!a} has none.")
        found = [use(text) for text in given]
    lines = [f"{text}\t{_words(answer)}" for text, answer in zip(given, found)]
    show([{"text": text, "result": answer} for text, answer in zip(given, found)], as_json, "\n".join(lines))


def _words(answer: Any) -> str:
    answers = answer if isinstance(answer, list) else [answer]
    words = []
    for one in answers[:5]:
        one = one[0] if isinstance(one, list) else one
        name = (
            one.get("token_str")
            or one.get("label")
            or f"{one.get('word')}={one.get('entity') or one.get('entity_group')}"
        )
        words.append(f"{str(name).strip()} ({one['score']:.0%})")
    return ", ".join(words)


class Use(StrEnum):
    """What an embedding model is used for."""

    ENCODE = "encode"
    SIMILARITY = "similarity"
    SEARCH = "search"
    CLUSTER = "cluster"


@app.command()
def embed(
    use: Annotated[Use, typer.Argument(help="encode, similarity, search or cluster.")],
    model: ModelArgument,
    texts: TextsArgument = None,
    file: FileOption = None,
    corpus: Annotated[Path | None, typer.Option(help="The file to search in.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many texts a search finds.")] = 5,
    num_clusters: Annotated[int | None, typer.Option(min=1, help="How many clusters.")] = None,
    output_dir: Annotated[Path, typer.Option(help="Where the result is written.")] = Path("embeddings"),
    as_json: JsonOption = False,
) -> None:
    """Use a sentence-embedding model."""
    if use is Use.SEARCH and corpus is None:
        raise BadInput("search needs --corpus, the file with the texts to search in.")
    given = _texts(texts, file)
    from ..training.tasks import PROGRAMS, load

    _, classes = PROGRAMS["sentence_embedding"].load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        import json

        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in given), encoding="utf-8")
        data: dict[str, Any] = {"mode": "clustering" if use is Use.CLUSTER else use.value, "input_file": str(path)}
        data |= {"corpus_file": str(corpus), "top_k": top_k} if use is Use.SEARCH else {}
        data |= {"num_clusters": num_clusters} if use is Use.CLUSTER else {}
        with talk_on_stderr():
            done = load("embedding_use:use")(
                classes["model"](model_name_or_path=model),
                classes["data"](**data),
                classes["training"](output_dir=str(output_dir)),
            )
    result = done["result"]
    result = result.tolist() if hasattr(result, "tolist") else result
    show(result, as_json, done["file"])


@app.command()
def compare(
    models: Annotated[list[str], typer.Argument(help="Runs, first the reference; seeds of one joined by commas.")],
    recipe: Annotated[str | None, typer.Option(help="Whose held-out data; by default that of the first run.")] = None,
    fail_if_worse: Annotated[
        float | None, typer.Option(help="Exit with 3 if a later model is surely worse than the first by more.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A JSON file to write too.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare language models on the same held-out rows: paired differences with 95 % intervals."""
    if len(models) < 2:
        raise BadInput("compare needs two models or more.")
    from .comparing import compared

    with talk_on_stderr():
        found = compared(models, recipe)
    if output is not None:
        from ..data.atomic import write_json

        write_json(output, found.values)
    show(found.values, as_json, str(found))
    if fail_if_worse is not None:
        worse = [row["model"] for row in found.values["models"][1:] if row["low"] > fail_if_worse]
        if worse:
            raise CheckFailed(f"worse than {models[0]} by more than {fail_if_worse:g}: {', '.join(worse)}.")
