"""How well embeddings find the texts that belong together, and what the words in common find without any model.

Importing this module needs sentence-transformers, the extra "embeddings".
"""

from collections import defaultdict
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer import evaluation
from sentence_transformers.util import cos_sim

from . import metrics

ROLES = ("anchor", "positive", "negative")
# what the evaluators call their results, and what the programs do
NAMES = {
    "loss": "loss",
    "cosine_accuracy@1": "accuracy@1",
    "cosine_mrr@10": "mrr@10",
    "cosine_ndcg@10": "ndcg@10",
    "cosine_accuracy": "triplet_accuracy",
    "pearson_cosine": "pearson",
    "spearman_cosine": "spearman",
}


def evaluator(rows: Any, loss: str) -> Any:
    """sentence-transformers' evaluators for rows with `anchor` and `positive`, and `negative` or `score`."""
    if loss == "cosine":
        return evaluation.EmbeddingSimilarityEvaluator(
            list(rows["anchor"]), list(rows["positive"]), list(rows["score"]),
            similarity_fn_names=["cosine"], write_csv=False,
        )  # fmt: skip
    queries, documents, relevant = retrieval(rows)
    search = evaluation.InformationRetrievalEvaluator(
        {str(place): text for place, text in enumerate(queries)},
        {str(place): text for place, text in enumerate(documents)},
        {str(place): set(map(str, places)) for place, places in enumerate(relevant)},
        accuracy_at_k=[1, 10], precision_recall_at_k=[10], score_functions={"cosine": cos_sim}, write_csv=False,
    )  # fmt: skip
    if "negative" not in rows.column_names:
        return search
    anchors, positives, negatives = (list(rows[role]) for role in ROLES)
    triplets = evaluation.TripletEvaluator(
        anchors, positives, negatives, similarity_fn_names=["cosine"], write_csv=False
    )
    return evaluation.SequentialEvaluator([search, triplets])


def tf_idf(train: Any, rows: Any, loss: str) -> dict[str, float]:
    """What TF-IDF vectors of the words, fitted to the rows `train`, reach on `rows`; by the names of `NAMES`."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    roles = [role for role in ROLES if role in rows.column_names]
    try:
        words = TfidfVectorizer(sublinear_tf=True).fit([text for role in roles for text in train[role]])
    except ValueError:  # not a word in them
        return {}
    vectors = {role: words.transform(list(rows[role])).toarray() for role in roles}
    if loss == "cosine":
        alike = metrics.regression((vectors["anchor"] * vectors["positive"]).sum(1), np.asarray(rows["score"]))
        return {name: alike[name] for name in ("pearson", "spearman")}
    queries, documents, relevant = retrieval(rows)
    scores = words.transform(queries) @ words.transform(documents).T
    order = np.argsort(-scores.toarray(), axis=1, kind="stable")
    ranks = np.asarray([np.isin(row, list(right)).argmax() for row, right in zip(order, relevant)])
    found = {
        "accuracy@1": float((ranks == 0).mean()),
        "mrr@10": float(np.where(ranks < 10, 1 / (ranks + 1), 0).mean()),
    }
    if "negative" in vectors:
        right, wrong = ((vectors["anchor"] * vectors[role]).sum(1) for role in ("positive", "negative"))
        found["triplet_accuracy"] = float((right > wrong).mean())
    return found


def retrieval(rows: Any) -> tuple[list[str], list[str], list[set[int]]]:
    """Different anchors, different positives, and for each anchor the places of the positives it stands with."""
    documents = {text: place for place, text in enumerate(dict.fromkeys(rows["positive"]))}
    relevant: dict[str, set[int]] = defaultdict(set)
    for anchor, positive in zip(rows["anchor"], rows["positive"]):
        relevant[anchor].add(documents[positive])
    return list(relevant), list(documents), list(relevant.values())
