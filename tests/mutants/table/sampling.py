"""Of the sampler: what changes logits, what truncates them, and what scores them."""

from tests.mutants.mutation import mutations_of

_FOLDER = "tests/engine/sampling"
_TRUNCATION_TESTS = (f"{_FOLDER}/test_truncation.py",)
_PARAMETER_TESTS = (
    f"{_FOLDER}/test_only_draws.py",
    f"{_FOLDER}/test_parameters.py",
    f"{_FOLDER}/test_logprobs.py",
    f"{_FOLDER}/test_reproducible.py",
    f"{_FOLDER}/test_distribution.py",
)

MUTATIONS = (
    *mutations_of(
        "src/engine/sampling/sampler.py",
        _PARAMETER_TESTS,
        (
            "scores are of what a grammar has left",
            "elif selection.changes_logits or end_ban or batch.mask is not None:",
            "elif selection.changes_logits or end_ban:",
        ),
        (
            "scores are of logits without end tokens",
            "elif selection.changes_logits or end_ban or batch.mask is not None:",
            "elif selection.changes_logits or batch.mask is not None:",
        ),
        (
            "scores are of truncated logits",
            "elif selection.changes_logits or end_ban or batch.mask is not None:",
            "elif end_ban or batch.mask is not None:",
        ),
        (
            "a NaN is hidden by what changes the logits",
            "if selection.changes_logits or batch.mask is not None:\n            is_sound",
            "if batch.mask is not None:\n            is_sound",
        ),
        (
            "a NaN is hidden by a grammar",
            "if selection.changes_logits or batch.mask is not None:\n            is_sound",
            "if selection.changes_logits:\n            is_sound",
            "what is NaN or +inf is one of them behind a mask too, and the draw sees it",
        ),
        (
            "a grammar is left out where rows only draw",
            "            and batch.mask is None\n",
            "",
        ),
        (
            "an end token is chosen one position early where rows only draw",
            "all(batch.positions[entry] >= first for",
            "all(batch.positions[entry] >= first - 1 for",
        ),
        (
            "a row has the parameters of its last owner",
            "key = (self.state.version, list(rows))",
            "key = (0, list(rows))",
        ),
        (
            "a row only draws because its last owner did",
            "key = (self.state.version, list(batch.rows))",
            "key = (0, list(batch.rows))",
        ),
        (
            "truncation of some rows is thrown away",
            "            logits[part.entries] = asking\n",
            "            pass\n",
        ),
        (
            "scores of some rows are of other rows' tokens",
            "chosen = (token_ids if entries is None else token_ids[entries]).clamp(min=0)",
            "chosen = token_ids[: len(selection.scored)].clamp(min=0)",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/truncation.py",
        _TRUNCATION_TESTS,
        (
            "top_p keeps a token though those before it are enough (short)",
            "((before < target) & (masses > 0)).sum(1, keepdim=True)",
            "((before <= target) & (masses > 0)).sum(1, keepdim=True)",
        ),
        (
            "top_p keeps a token though those before it are enough (by sorting)",
            "np.count_nonzero((before < target) & (masses > 0))",
            "np.count_nonzero((before <= target) & (masses > 0))",
        ),
        (
            "ties that top_k kept have no mass",
            "masses.sum(1, keepdim=True) + tied * kth_mass",
            "masses.sum(1, keepdim=True)",
        ),
        (
            "a top_p of 1 drops what has no mass",
            "threshold = torch.where(rows.top_p < 1.0, lowest, floor)",
            "threshold = lowest",
        ),
        (
            "a top_p of 1 drops what has no mass (long)",
            "(weights < lowest(weights, rows.top_p)) & (rows.top_p < 1.0)",
            "(weights < lowest(weights, rows.top_p))",
        ),
        (
            "top_k keeps one too few",
            "logits.kthvalue(logits.shape[1] - k + 1, keepdim=True)",
            "logits.kthvalue(min(logits.shape[1], logits.shape[1] - k + 2), keepdim=True)",
        ),
        (
            "top_p looks at what min_p has dropped",
            "        weights.masked_fill_(dropped, 0.0).nan_to_num_(0.0)\n",
            "        weights.nan_to_num_(0.0)\n",
        ),
        (
            "a short row does not heed min_p",
            "floor = torch.maximum(_floor(logits, largest[:, :1], rows), kth)",
            "floor = kth",
        ),
        (
            "a short row's top_p has no temperature",
            "(largest - largest[:, :1]).double() / rows.temperatures.double()",
            "(largest - largest[:, :1]).double()",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/logits.py",
        _PARAMETER_TESTS,
        (
            "a ban lifts what may never be chosen",
            "flat[targets] = flat[targets].clamp(max=BANNED)",
            "flat[targets] = BANNED",
        ),
        (
            "bad words are looked for in the prompt",
            "tails.masked_fill_(columns < bad.prompt_lens[:, None], _OUTSIDE)",
            "tails.masked_fill_(columns < 0, _OUTSIDE)",
        ),
        (
            "the last of bad words that share their last token wins",
            'scatter_reduce_(0, bad.targets, ceilings, "amin")',
            'scatter_reduce_(0, bad.targets, ceilings, "amin", include_self=False)',
        ),
        (
            "presence and frequency count the prompt",
            "is_output = known & (index >= penalties.prompt_lens[part][:, None])",
            "is_output = known",
        ),
        (
            "a penalty lifts a ban",
            "torch.where(before > BANNED, values, before)",
            "values",
        ),
        (
            "presence counts how often",
            "values -= penalties.presence[part] * (count > 0)",
            "values -= penalties.presence[part] * count",
        ),
        (
            "what lies behind a row's tokens is penalized",
            "    ids = torch.where(known, ids, ids[:, :1])  # [n, L] int64\n",
            "    ids = ids.clamp(min=0)\n",
        ),
        (
            "a repetition makes a negative logit likelier",
            "torch.where(before > 0, before / repetition, before * repetition)",
            "before / repetition",
        ),
        (
            "a penalized logit is below what may never be chosen",
            "    values.clamp_(-_LARGEST, _LARGEST)\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/selection.py",
        _PARAMETER_TESTS,
        (
            "an end token may be chosen one position late",
            "positions[entry] < first_position",
            "positions[entry] <= first_position",
        ),
        (
            "the end tokens of one row are banned for the whole batch's life",
            "        if active != self._end_ban_key:\n",
            "        if active and not self._end_ban_key:\n",
        ),
        (
            "scores are of biased logits",
            "for part in (self.allowed, self.banned, self.bias, self.bad_sequences,",
            "for part in (self.allowed, self.banned, self.bad_sequences,",
        ),
        (
            "bad words of one row are another's",
            "torch.cat([words.last + entry * width for entry, words in asking])",
            "torch.cat([words.last for entry, words in asking])",
        ),
        (
            "penalties of presence are left out beside a row that only has repetition",
            "counts_output=any(params[entry].counts_output for entry in self.penalized)",
            "counts_output=all(params[entry].counts_output for entry in self.penalized)",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/state.py",
        _PARAMETER_TESTS,
        (
            "a row that changes hands looks as it was",
            "        self._version += 1\n",
            "",
        ),
        (
            "an end token may be chosen one token early",
            "first_end_position=prompt_len + params.min_tokens,",
            "first_end_position=prompt_len + params.min_tokens - 1,",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/truncation.py",
        (*_PARAMETER_TESTS, f"{_FOLDER}/test_typical_and_sigma.py"),
        (
            "min_p does not grow with the temperature",
            "return params.temperature * math.log(params.min_p)",
            "return math.log(params.min_p)",
        ),
        (
            "greedy rows are truncated",
            "return OFF if params.is_greedy else tuple(",
            "return tuple(",
        ),
        (
            "a top_p of 0 keeps nothing",
            "lambda params: max(params.top_p, _LEAST_MASS)",
            "lambda params: params.top_p",
        ),
        (
            "a typical_p of 0 keeps nothing",
            "lambda params: max(params.typical_p, _LEAST_MASS)",
            "lambda params: params.typical_p",
        ),
        (
            "typical is what is likely",
            "distances = (surprises.double() - mean).abs_().float()",
            "distances = surprises.clone()",
        ),
        (
            "top_p heeds what typical_p has dropped",
            "        weights.masked_fill_(dropped, 0.0)\n    if rows.top_p",
            "    if rows.top_p",
        ),
        (
            "a short row does not heed typical_p",
            'if is_short(top_k) and "typical_p" not in asked:',
            "if is_short(top_k):",
        ),
        (
            "banned logits are part of the deviation",
            "    valid = logits > BANNED / 10\n",
            "    valid = logits > -torch.inf\n",
        ),
        (
            "a row without top_n_sigma has that of its batch",
            "torch.where(rows.top_n_sigma > 0.0, by_sigma, -torch.inf)",
            "by_sigma",
        ),
        (
            "a deviation depends on the batch",
            "        half = (width + 1) // 2\n",
            "        half = (width + 1) // 2 if len(values) > 1 else width - 1\n",
        ),
        (
            "typical_p keeps a token though those before it are enough (by sorting)",
            "before < float(typical_p) * float(mass.sum())",
            "before <= float(typical_p) * float(mass.sum())",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/logprobs.py",
        (f"{_FOLDER}/test_logprobs.py",),
        (
            "ranks are counted from 0",
            "ranks=likelier.sum(1) + 1,",
            "ranks=likelier.sum(1),",
        ),
        (
            "equal tokens have the rank of the last",
            "likelier = logits > logits.gather(1, chosen)",
            "likelier = (logits >= logits.gather(1, chosen)) & (logits.gather(1, chosen) < 9e9)",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/prompt_logprobs.py",
        (f"{_FOLDER}/test_prompt_logprobs.py",),
        (
            "the first output token is scored as one of the prompt",
            "min(step.num_tokens, request.prompt_len - 1 - step.start)",
            "min(step.num_tokens, request.prompt_len - step.start)",
        ),
        (
            "scores are of another row's tokens",
            "        first_token += step.num_tokens\n",
            "",
        ),
        (
            "a request that resumes with output is scored again",
            "return None if has_output or request.params.prompt_logprobs is None else request",
            "return None if request.params.prompt_logprobs is None else request",
        ),
    ),
)
