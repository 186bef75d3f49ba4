"""Converts the encoders for another runtime: `export_vectors.py openvino|onnx CHECKPOINT TO`.

The checkpoint has the folders `embedder` and `ranker`, and so has what is written.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

_NAMES = ("input_ids", "attention_mask", "token_type_ids")


def main() -> None:
    kind, checkpoint, to = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    for name, loads, output in (
        ("embedder", AutoModel, "last_hidden_state"),
        ("ranker", AutoModelForSequenceClassification, "logits"),
    ):
        folder = to / name
        folder.mkdir(parents=True)
        model: Any = loads.from_pretrained(
            checkpoint / name, attn_implementation="eager" if kind == "onnx" else "sdpa"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / name)
        if kind == "onnx":
            write_onnx(model, folder, output)
        else:
            write_openvino(one_output(model, output), tokenizer, folder, output)
            shutil.copy(checkpoint / name / "config.json", folder)


def example() -> dict[str, Any]:
    """Inputs of a batch."""
    import torch

    ids = torch.randint(1000, 2000, (2, 8))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }


def one_output(model: Any, output: str) -> Any:
    """The model as a module that gives one tensor."""
    import torch

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            given = dict(zip(_NAMES, (input_ids, attention_mask, token_type_ids), strict=True))
            return getattr(self.model(**given), output)

    return One().eval()


def write_onnx(model: Any, folder: Path, output: str) -> None:
    """Write ``model.onnx``."""
    import torch

    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        one_output(model, output),
        tuple(example().values()),
        str(folder / "model.onnx"),
        input_names=list(_NAMES),
        output_names=[output],
        dynamic_shapes=(axes, axes, axes),
        dynamo=True,
        external_data=False,
    )


def write_openvino(model: Any, tokenizer: Any, folder: Path, output: str) -> None:
    """Write the model and its tokenizer as GenAI's pipelines read them."""
    import openvino
    from openvino_tokenizers import convert_tokenizer

    converted = openvino.convert_model(
        model, example_input=example(), input=[(name, [-1, -1]) for name in _NAMES]
    )
    converted.outputs[0].get_tensor().set_names({output})
    openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")


if __name__ == "__main__":
    main()
