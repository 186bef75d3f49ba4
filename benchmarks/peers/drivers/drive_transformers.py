"""Hugging Face transformers: `generate` on a batch, or its own continuous batching."""

from __future__ import annotations

import itertools
from typing import Any

from turns import Answer, Ask, Clocked, answer_turns


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["checkpoint"],
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        local_files_only=True,
    )
    model = model.to(device).eval()
    # No output ends early.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if options["continuous"]:
        return of_continuous_batching(model, options), {"dtype": "bfloat16"}
    return of_generate(model), {"dtype": "bfloat16"}


def of_generate(model: Any) -> Ask:
    """Answer the prompts of a turn, which have the same length, as one batch."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Watch(StoppingCriteria):
        """Records every token of every row, and stops none."""

        def __init__(self, requests: list[Clocked]) -> None:
            self.requests = requests

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            for request, token in zip(self.requests, input_ids[:, -1].tolist(), strict=True):
                request.take([token])
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def ask(prompts: list[list[int]], output_len: int) -> list[Answer]:
        requests = [Clocked() for _ in prompts]
        ids = torch.tensor(prompts, device=model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Watch(requests)]),
        )
        return [request.answer for request in requests]

    return ask


def of_continuous_batching(model: Any, options: dict[str, Any]) -> Ask:
    """Answer the requests of a turn, batched by the library's own scheduler."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig()
    # By default it takes most of the machine's memory.
    batching.num_blocks = options["kv_tokens"] // batching.page_size
    batching.max_requests_per_batch = options["max_num_seqs"]
    manager = model.init_continuous_batching(
        generation_config=settings, continuous_batching_config=batching
    )
    manager.start()
    numbers = itertools.count()

    def ask(prompts: list[list[int]], output_len: int) -> list[Answer]:
        requests = {}
        for prompt in prompts:
            name = f"r{next(numbers)}"
            requests[name] = Clocked()
            manager.add_request(prompt, name, max_new_tokens=output_len, streaming=True)
        left = len(prompts)
        while left:
            output = manager.get_result(timeout=60)
            if output is None:
                if manager.is_running():
                    continue
                raise RuntimeError("continuous batching has ended")
            if output.error:
                raise RuntimeError(output.error)
            request = requests[output.request_id]
            # An output contains all tokens so far.
            request.take(list(output.generated_tokens)[len(request.tokens) :])
            left -= output.is_finished()
        return [request.answer for request in requests.values()]

    return ask


if __name__ == "__main__":
    answer_turns(open_engine)
