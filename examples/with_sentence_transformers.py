"""ProxyGML with sentence-transformers: labeled sentences, trained with its own trainer.

This tiny model starts from random weights and needs no download; replace it with e.g.
`SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")`.
"""

import random
import tempfile
from collections.abc import Iterable

import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from proxygml import ProxyGMLLoss, evaluate


class SentenceLoss(torch.nn.Module):
    """The trainer's loss interface: token features of each dataset column, labels (B,) -> scalar."""

    def __init__(self, model: SentenceTransformer, loss: ProxyGMLLoss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, sentence_features: Iterable[dict[str, torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        (features,) = sentence_features  # one column
        return self.loss(self.model(features)["sentence_embedding"], labels)


def tiny_model(words: list[str]) -> SentenceTransformer:
    """A small BERT with random weights and this vocabulary."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(config).save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
        ).save_pretrained(folder)
        return SentenceTransformer(folder, device="cpu")


def sentences(topics: list[list[str]], others: list[str], each: int) -> Dataset:
    """Synthetic data, replace with yours: two words of a topic among four uninformative ones."""
    labels = [label for label in range(len(topics)) for _ in range(each)]
    words = [random.sample(topics[label], 2) + random.sample(others, 4) for label in labels]
    return Dataset.from_dict({"sentence": [" ".join(sentence) for sentence in words], "label": labels})


def recall(model: SentenceTransformer, data: Dataset) -> float:
    vectors = model.encode(data["sentence"], show_progress_bar=False)
    return evaluate(vectors, torch.tensor(data["label"]), cluster=False).recall[1]


random.seed(0)
torch.manual_seed(0)
topics = [[f"topic{topic}word{word}" for word in range(6)] for topic in range(20)]
others = [f"other{word}" for word in range(50)]
train_data, test_data = sentences(topics, others, each=16), sentences(topics, others, each=8)
model = tiny_model([*others, *(word for words in topics for word in words)])
loss = SentenceLoss(model, ProxyGMLLoss(num_classes=20, embedding_dim=32, proxies_per_class=2, ratio=0.3))

before = recall(model, test_data)
with tempfile.TemporaryDirectory() as folder:
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            folder,
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            learning_rate_mapping={r"loss\.proxies": 3e-2},  # the proxies
            lr_scheduler_type="constant",
            save_strategy="no",  # checkpoints would not contain the proxies
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=train_data,
        loss=loss,
    ).train()
print(f"Recall@1 of new sentences: {before:.2f} before, {recall(model, test_data):.2f} after")
