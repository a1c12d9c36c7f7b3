"""What `scripts/run_embedding.py` does with a trained model: similarity, search, clustering, encoding."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from sentence_transformers.util import cos_sim, semantic_search

from ..data.atomic import write_bytes, write_json
from .arguments import BadInput, ModelArguments
from .embedding import NUM_CLUSTERS, EmbeddingArguments, EmbeddingProgramArguments, is_sentence_transformer, load
from .failures import readable
from .sources import read_files, strings, text_column


def use(
    model_args: ModelArguments, data_args: EmbeddingArguments, training_args: EmbeddingProgramArguments
) -> dict[str, Any]:
    """Do what `--mode` says with the texts of `--input_file`; returns what was written into `--output_dir`.

    * encode: `embeddings.npy`, [texts, width] in float32, in the order of the file;
    * similarity: `similarity.json`, the cosine of each pair, where a row has two texts, else `similarity.npy` with that
      of every two texts, [texts, texts];
    * search: `search.json`, for each text the `--top_k` most similar ones of `--corpus_file`;
    * clustering: `clusters.json`, the number of each text's cluster (k-means), and the texts by cluster.

    Raises:
        BadInput: Anything that cannot work; nothing has been written then.
    """
    data_args.check()
    name = model_args.model_name_or_path
    if not name:
        raise BadInput(f"--mode {data_args.mode} needs a trained model: --model_name_or_path.")
    if not is_sentence_transformer(name, model_args.model_revision):
        raise BadInput(f"--model_name_or_path {name} is no embedding model; train one with --mode train.")
    inputs = _texts(data_args, data_args.input_file, pairs=data_args.mode == "similarity")
    corpus = _texts(data_args, data_args.corpus_file)[0] if data_args.mode == "search" else []
    different = len(set(inputs[0]))
    num_clusters = data_args.num_clusters or min(NUM_CLUSTERS, different)
    if data_args.mode == "clustering" and num_clusters > different:
        raise BadInput(f"--num_clusters {num_clusters} is more than the {different} different texts.")
    transformers.logging.set_verbosity(training_args.get_process_log_level())
    transformers.logging.disable_progress_bar()
    model = readable(name, lambda: load(model_args))

    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, batch_size=training_args.per_device_eval_batch_size, show_progress_bar=False)

    output, texts = Path(training_args.output_dir or ""), inputs[0]
    vectors = encode(texts)
    result: Any
    if data_args.mode == "encode":
        result, file = vectors.astype(np.float32), "embeddings.npy"
    elif data_args.mode == "similarity" and len(inputs) == 2:
        cosines = [float(cos_sim(*pair)) for pair in zip(vectors, encode(inputs[1]))]
        result = [{"first": one, "second": two, "score": score} for one, two, score in zip(*inputs, cosines)]
        file = "similarity.json"
    elif data_args.mode == "similarity":
        result, file = cos_sim(vectors, vectors).numpy(), "similarity.npy"
    elif data_args.mode == "search":
        found: Any = semantic_search(vectors, encode(corpus), top_k=min(data_args.top_k, len(corpus)))  # type: ignore[arg-type]
        result = [
            {
                "query": query,
                "hits": [{"place": x["corpus_id"], "text": corpus[x["corpus_id"]], "score": x["score"]} for x in hits],
            }
            for query, hits in zip(texts, found)
        ]
        file = "search.json"
    else:
        result, file = _clusters(vectors, texts, num_clusters, training_args.seed), "clusters.json"
    path = _write(output / file, result)
    print(f"{len(texts):,} texts: {path}", flush=True)
    return {"file": str(path), "result": result}


def _clusters(vectors: np.ndarray, texts: list[str], number: int, seed: int) -> dict[str, Any]:
    from sklearn.cluster import KMeans

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(lengths, 1e-12)  # as the cosine sees them
    labels = KMeans(number, n_init=10, random_state=seed).fit_predict(directions).tolist()
    clusters = [[text for text, label in zip(texts, labels) if label == cluster] for cluster in range(number)]
    return {"labels": labels, "clusters": clusters}


def _write(path: Path, result: Any) -> Path:
    if not isinstance(result, np.ndarray):
        return write_json(path, result)
    buffer = io.BytesIO()
    np.save(buffer, result)
    return write_bytes(path, buffer.getvalue())


def _texts(data_args: EmbeddingArguments, file: str | None, pairs: bool = False) -> list[list[str]]:
    """One list of texts, or two where `pairs` are wanted and rows have two."""
    from datasets.exceptions import DatasetsError

    assert file is not None
    try:
        rows = read_files({"train": file})["train"]
    except (DatasetsError, OSError, ValueError) as error:
        raise BadInput(f"Cannot read {file}: {error}") from error
    columns = [name.strip() for name in (data_args.columns or "").split(",") if name.strip()] or strings(rows)
    if not (pairs and data_args.text_column is None and len(columns) == 2):
        columns = [text_column(rows, data_args.text_column)]
    elif missing := [name for name in columns if name not in strings(rows)]:
        raise BadInput(f"{file} has no column of text {missing[0]!r}; there are {', '.join(strings(rows)) or 'none'}.")
    texts = [list(rows[column]) for column in columns]
    for column, values in zip(columns, texts):
        if empty := [str(place) for place, text in enumerate(values) if not text]:
            raise BadInput(f"Row {empty[0]} of {file} has nothing in {column!r}.")
    return texts
