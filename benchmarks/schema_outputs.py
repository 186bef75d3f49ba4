"""What the demo model writes under real JSON schemas: each whole output has to be an instance.

    python -m benchmarks.schema_outputs schemas.jsonl.gz --tokens 200 --seeds 2

The file is one of `benchmarks.real_schemas`. Each schema that is not refused constrains outputs at
temperature 1, with and without a stop string. A random model rarely ends a long output by itself,
so white space is off. The exit status is 1 if a complete output is no instance, or if a request
fails after it was accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from src import AsyncEngine, SamplingParams
from src.core.errors import InvalidRequestError, SlipstreamError
from src.core.outputs import FinishReason
from src.core.settings import load_config
from src.core.structured_output import StructuredOutput

# Requests at once.
_AT_ONCE = 32


class Survey:
    """How outputs ended, and what was wrong with some."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def judge(self, name: str, schema: Any, text: str) -> None:
        """Take a complete output."""
        try:
            kind = jsonschema.validators.validator_for(
                schema, default=jsonschema.Draft202012Validator
            )
            kind(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            self.wrong.append(f"{name}: {str(error).splitlines()[0][:120]}: {text[:120]}")


async def survey(path: Path, tokens: int, seeds: int) -> Survey:
    """Generate under each schema of a file."""
    found = Survey()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        cases = [json.loads(line) for line in lines]
    limit = asyncio.Semaphore(_AT_ONCE)
    refused: set[str] = set()
    served: set[str] = set()
    async with AsyncEngine.open(load_config("configs/demo.toml")) as engine:

        async def one(case: dict[str, Any], seed: int, stop: tuple[str, ...]) -> None:
            output = StructuredOutput.json(case["schema"], any_whitespace=False)
            params = SamplingParams(
                max_tokens=tokens, seed=seed, stop=stop, structured_output=output
            )
            async with limit:
                try:
                    result = await engine.generate("A record:\n", params)
                except InvalidRequestError:
                    found.ends["refused"] += 1
                    refused.add(case["name"])
                    return
                except SlipstreamError as error:
                    found.wrong.append(f"{case['name']}: {type(error).__name__}: {error}")
                    return
            served.add(case["name"])
            (completion,) = result.completions
            found.ends[str(completion.finish_reason)] += 1
            if completion.finish_reason is FinishReason.STOP:
                found.judge(case["name"], case["schema"], completion.text)

        await asyncio.gather(
            *(
                one(case, seed, stop)
                for case in cases
                for seed in range(seeds)
                for stop in ((), ("e",))
            )
        )
    # A schema is refused before anything is generated, or never.
    found.wrong += [f"{name}: refused once it was served" for name in sorted(refused & served)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survey."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    found = asyncio.run(survey(options.file, options.tokens, options.seeds))
    for end, count in found.ends.items():
        print(f"{count:6} {end}")
    for line in found.wrong:
        print(line)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
