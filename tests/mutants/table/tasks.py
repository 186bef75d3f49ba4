"""Of vectors: how texts become them, and that nobody gets another's."""

from tests.mutants.mutation import mutations_of, rewrites_of

_ENGINE = ("tests/engine/test_embeddings.py",)
_HTTP = ("tests/http/embeddings/test_embeddings.py",)
_OTHERS = ("tests/http/embeddings/test_other_protocols.py",)
_COSINES = ("tests/http/ranks/test_cosines.py",)
_HEADS = ("tests/http/ranks/test_heads.py",)

_LABELS = "tests/engine/test_classifiers.py"
_RANKS = "tests/engine/test_rerankers.py"

_CALLS = "tests/engine/test_embedding_calls.py"
_ANSWERS = "tests/http/ranks/test_answers.py"

_READING = "tests/engine/test_reading_beside_the_loop.py"

_GENERIC = "tests/engine/test_generic_classifiers.py"
_QUOTED = ("tests/text/test_quoted.py",)

MUTATIONS = (
    *rewrites_of(
        "src/text/quoted.py",
        _QUOTED,
        ("texts are not quoted", "QuotingTokenizer.quoted", "A.replaced(B, C)", "B"),
        ("nothing is exchanged", "QuotingTokenizer.exchanged", "A.replaced(B, C)", "B"),
        (
            "what stands over the end of a slice is not found",
            "TextSearch.found",
            "A + self._longest - 1",
            "A",
        ),
        (
            "a search of a long text keeps the others waiting",
            "TextSearch.found",
            "time.sleep(0)",
            "None",
        ),
        (
            "the shorter of two texts that begin alike is found",
            "_factored",
            "A += '?'",
            "A += '??'",
        ),
        (
            "a token of the vocabulary keeps its name",
            "QuotingTokenizer._made",
            "_rename(A, B)",
            "",
        ),
        (
            "texts that are normalized to special tokens are not thought of",
            "QuotingTokenizer.__init__",
            "self.is_for_all: bool = A",
            "self.is_for_all: bool = False",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/pairs.py",
        (f"{_RANKS}::test_a_text_cannot_forge_a_turn_of_the_template",),
        (
            "special tokens of texts are the template's",
            "PairBuilder._rendered",
            "A != [None, None]",
            "False",
        ),
        (
            "a document is cut by other tokens than it has in the template",
            "PairBuilder._own_ids",
            "A is None",
            "True",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/reranks.py",
        (f"{_HEADS[0]}::test_scores_that_are_equal_in_float32_keep_their_order",),
        ("ranks follow rounded scores", "_rerank", "A[B].raw", "A[B].score"),
    ),
    *rewrites_of(
        "src/core/outputs.py",
        (f"{_HEADS[0]}::test_labels_that_are_equal_in_float32_keep_their_order",),
        (
            "labels follow rounded probabilities",
            "Classification.likeliest_first",
            "memoryview(self.raw)",
            "memoryview(self.numbers)",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/scores.py",
        _COSINES,
        (
            "a single query has an index in errors",
            "with_sides",
            'A.param == "query" and B',
            "False",
        ),
    ),
    *rewrites_of(
        "src/core/embedding.py",
        (f"{_ENGINE[0]}::test_queries_and_documents_have_the_prompts_of_the_checkpoint",),
        (
            "a query has no prompt",
            "EmbeddingRecipe.query_prompt",
            'self.prompts.get("query", "")',
            '""',
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_ENGINE[0]}::test_queries_and_documents_have_the_prompts_of_the_checkpoint",),
        (
            "a document has the vector of an equal query",
            "CosineRun.__init__",
            "A is not None or B[0] != B[1]",
            "A is not None",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedder.py",
        (f"{_ENGINE[0]}::test_a_cut_leaves_a_token_of_the_text",),
        ("a cut may leave the prompt alone", "Embedder._num_of_prompt", "not A", "True"),
        ("a cut may leave special tokens alone", "Embedder.tokens", "A <= B", "False"),
    ),
    *rewrites_of(
        "src/engine/requests/prompts.py",
        (f"{_ENGINE[0]}::test_a_text_with_a_token_that_has_no_position_is_refused",),
        (
            "token ids may have a token without a position",
            "RequestBuilder.checked_ids",
            "self._check_counted(A, B)",
            "",
        ),
    ),
    *rewrites_of(
        "src/models/generic/classifiers.py",
        (_GENERIC,),
        (
            "what the encoder's pooler makes is left out",
            "_pooled",
            "A is None",
            "True",
        ),
        (
            "the kinds of tokens are passed over",
            "ClassifierBody.__init__",
            "A > 1 and B in C and not D",
            "False",
        ),
        (
            "a head that reads something else is served",
            "pooling_of_head",
            "A[B] > _TOLERANCE",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/text_work.py",
        (
            "tests/engine/requests/test_text_work.py::test_the_loop_takes_some_text_at_once_and_more_as_time_goes_by",
        ),
        (
            "the event loop tokenizes as many short texts as there are",
            "InlineBudget.take",
            "A or self._used + size > _BURST_CHARS",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/text_work.py",
        (f"{_READING}::test_many_tiny_texts_are_read_beside_the_loop",),
        ("a text of one character takes a character's time", "chars_of_time", "max(A, B)", "A"),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_READING}::test_a_long_prompt_counts_with_each_text",),
        (
            "a prompt before texts takes no time",
            "EmbeddingRun._chars",
            "A + self._prompt_chars",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        ("tests/engine/test_embeddings.py::test_projections_behind_the_pooling",),
        (
            "a token's vector has as many numbers as a text's",
            "TokenVectorRun._made",
            "_encoding(self.request_id, A, B.token_size, C)",
            "_encoding(self.request_id, A, B.size, C)",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_READING}::test_many_tiny_pairs_are_read_beside_the_loop",),
        ("copies of a query take no time", "PairRun._chars", "A + B // C", "A"),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_READING}::test_what_is_compared_is_the_token_ids_and_their_types",),
        ("what equals token ids is the same text", "_key", "set(map(type, A)) == {int}", "True"),
        (
            "no text is the one of the pair before",
            "CosineRun.__init__",
            "_NO_TEXTS",
            "(None, None)",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_READING}::test_texts_of_many_pairs_are_compared_beside_the_loop",),
        ("a query is compared with each document", "CosineRun._number", "A is B[C]", "False"),
        (
            "texts of pairs are compared on the event loop",
            "CosineRun._read",
            "await A.beside(B, C, self._add, D)",
            "self._add(D)",
        ),
    ),
    *rewrites_of(
        "src/http/server/tracing.py",
        ("tests/observability/test_task_traces.py",),
        ("a page has the span of vectors", "begin_trace", 'A["method"] != "POST"', "False"),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_CALLS}::test_many_short_texts_are_tokenized_beside_the_loop",),
        (
            "each text of a call is a job of its own",
            "EmbeddingRun._batch",
            "start + _BATCH_TEXTS",
            "start + 1",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_LABELS}::test_what_a_long_text_gets_is_finished_beside_the_loop",),
        (
            "the event loop finishes what a long text gets",
            "EmbeddingRun._vector",
            "len(A.vector) <= B",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_ANSWERS}::test_results_of_tokens_count_once_there_are_tokens",),
        (
            "results of tokens are held and not counted",
            "EmbeddingRun._read",
            "if self.on_counted is not None: A",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedder.py",
        (f"{_LABELS}::test_a_reward_is_of_the_whole_chat",),
        (
            "a chat is classified whole though it is to be cut",
            "Embedder.tokens_of_chat",
            "(await A)[:B]",
            "await A",
        ),
    ),
    *rewrites_of(
        "src/text/beginnings.py",
        ("tests/text/test_beginnings.py",),
        (
            "far too long texts are tokenized whole",
            "encode_beginning",
            "A < len(text)",
            "False",
        ),
        (
            "tokens of a word that is cut apart count",
            "encode_beginning",
            "len(A) > B",
            "len(A) > enough",
        ),
        ("a far too long text is its own beginning", "begins", "A < len(text)", "False"),
    ),
    *rewrites_of(
        "src/engine/requests/pairs.py",
        ("tests/engine/requests/test_pairs.py",),
        (
            "a cut takes a text's own replacement characters",
            "PairBuilder._spelled",
            "A.rstrip(B) + C",
            "A.rstrip(B)",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/waiting.py",
        (f"{_CALLS}::test_texts_that_are_not_queued_yet_count_as_waiting",),
        (
            "one call may take all that may wait",
            "WaitingQueue.most_tokens_of_call",
            "A.max_tokens // 2",
            "self.max_tokens",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/waiting.py",
        ("tests/engine/scheduling/test_room_beside_calls.py",),
        (
            "texts of calls leave no place to others",
            "WaitingQueue.check_further",
            "len(self) and A + 1 > _TAKEN_FOR_LEFT * B",
            "False",
        ),
        (
            "one text too many waits behind the first of its call",
            "WaitingQueue.check_further",
            "A + 1 > _TAKEN_FOR_LEFT * B",
            "further > _TAKEN_FOR_LEFT * left",
        ),
        (
            "an empty queue takes no further text where only one may wait",
            "WaitingQueue.check_further",
            "len(self) and A",
            "further + 1 > _TAKEN_FOR_LEFT * left",
        ),
        (
            "texts of calls leave no tokens to others",
            "WaitingQueue.check_further_tokens",
            "A + B > _TAKEN_FOR_LEFT * C",
            "False",
        ),
        (
            "tokens of texts that are not queued leave room to others",
            "WaitingQueue.check_further_tokens",
            "A += B",
            "",
        ),
        (
            "a tenant's calls leave room to the other tenants alone",
            "_room",
            "(A - B - C) // 2 if D else A - B",
            "most - of_all",
        ),
        (
            "what no queue would take is to be asked for again",
            "WaitingQueue.most_tokens_of_call",
            "if not A: B",
            "return self.max_tokens // 2",
        ),
        (
            "calls that have queued everything have a share",
            "Reservation.restore",
            "A and self.num_tokens > 0",
            "self._has_begun",
        ),
        (
            "calls that still read their texts have a share",
            "Reservation.restore",
            "A and self.num_tokens > 0",
            "self.num_tokens > 0",
        ),
        (
            "calls share what no others leave them",
            "WaitingQueue.most_further",
            "A + B + C",
            "running + further + left // (_TAKEN_FOR_LEFT + 1)",
        ),
        (
            "the first text of a call is one of many",
            "Lane.count",
            "if A.request.is_further: B",
            "if state.request.call is not None:\n    self.num_further += sign\n"
            "    self.num_further_tokens += num_tokens",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_CALLS}::test_who_asks_for_one_thing_is_never_refused_for_texts_of_many_calls",),
        (
            "a call that came first has more than its part",
            "EmbeddingRun._window",
            "min(_WINDOW, A)",
            "_WINDOW",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (f"{_CALLS}::test_a_call_that_cannot_be_let_in_is_not_read",),
        (
            "a call is read before it is refused",
            "EmbeddingRun.prepare",
            "if len(texts) > 1: A",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/scheduler.py",
        (f"{_CALLS}::test_who_asks_for_one_thing_is_never_refused_for_texts_of_many_calls",),
        (
            "texts behind the first of their calls take places as others do",
            "Scheduler.check_room",
            "if requests[0].is_further: A",
            "",
        ),
    ),
    *rewrites_of(
        "src/http/embeddings/vectors.py",
        (f"{_ANSWERS}::test_labels_of_texts_have_a_bound_and_count_until_they_are_sent",),
        (
            "an answer has any number of labels",
            "held_numbers",
            "count > A",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/observed.py",
        ("tests/observability/test_task_traces.py",),
        (
            "a request for vectors has a trace beside its caller's",
            "ObservedRun.__init__",
            '"trace" not in A',
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        (f"{_LABELS}::test_labels_of_texts_are_those_of_transformers",),
        (
            "labels are the hidden state itself",
            "RowPooling.through_head",
            "not any(A)",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        ("tests/engine/execution/test_pooling.py",),
        (
            "a row's tokens begin with those of the request before it",
            "Vectors._numbers",
            "[] if A.start == 0 else B",
            "B",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        (f"{_RANKS}::test_a_published_reranker_scores_by_yes_and_no",),
        (
            "the logit of no is not taken off",
            "score_of",
            "if A.false_id is not None: B",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_LABELS}::test_scores_of_pairs_are_those_of_transformers",),
        (
            "both texts of a pair are of the first kind",
            "PairRun._types",
            "self._kinds[A]",
            'b""',
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_LABELS}::test_labels_of_texts_are_those_of_transformers",),
        (
            "probabilities are the head's own numbers",
            "LabelRun.__init__",
            'A.activation if B else "none"',
            '"none"',
        ),
    ),
    *rewrites_of(
        "src/engine/requests/task_runs.py",
        (f"{_LABELS}::test_a_model_that_embeds_scores_by_the_cosine",),
        (
            "equal texts are computed again",
            "CosineRun._number",
            "A.setdefault(B, C)",
            "C",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/pairs.py",
        (f"{_LABELS}::test_a_query_is_tokenized_once_for_all_its_documents",),
        (
            "a query is tokenized again with each document",
            "PairBuilder.tokens",
            "A.text != B",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/pairs.py",
        (f"{_LABELS}::test_a_pair_that_is_too_long_is_cut_as_transformers_does",),
        (
            "the second text is cut alone",
            "_longest_first",
            "2 * A <= B",
            "True",
        ),
    ),
    *rewrites_of(
        "src/models/heads/head.py",
        (f"{_LABELS}::test_the_activation_that_files_name_is_used",),
        (
            "the kind of problem is passed over",
            "activation_of",
            "_PROBLEMS.get(A, B)",
            "B",
        ),
    ),
    *rewrites_of(
        "src/models/registry.py",
        (f"{_LABELS}::test_what_a_checkpoint_asks_for_that_is_not_known_is_refused",),
        (
            "a classifier's own code is passed over",
            "architecture_of",
            'if A in _HEADS: B = "scores"',
            "",
        ),
    ),
    *rewrites_of(
        "src/models/tasks.py",
        (f"{_RANKS}::test_the_chat_template_of_a_checkpoint_is_used",),
        (
            "the template of the checkpoint is passed over",
            "_Finder._templated",
            "self.tokenizer.has_chat_template and any(A)",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/memory_profile.py",
        ("tests/engine/execution/test_memory_profile.py",),
        (
            "no step that pools is in the memory profile",
            "compute_largest_step",
            "not is_captured and (A := _pooled_requests(config, model))",
            "False",
        ),
        (
            "what a pooled step keeps is not there while the next one is computed",
            "compute_largest_step",
            "A = _pooled_steps(B, C, D, E)",
            "_pooled_steps(B, C, D, E)",
        ),
        (
            "tasks that are not served are in the memory profile",
            "_pooled_requests",
            'if A != "auto" and B not in A: return ()',
            "",
        ),
        (
            "a step that pools has the tokens of one row",
            "_whole_prompts",
            "A -= B",
            "A = 0",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        ("tests/engine/execution/test_pooling.py",),
        (
            "results of all dtypes are copied as those of the first",
            "Vectors.copied",
            "B.dtype == C",
            "True",
        ),
        (
            "hidden states of tokens are handed out in the model's dtype",
            "Vectors._numbers",
            "value.float().numpy()",
            "value.view(torch.uint8).numpy()",
        ),
    ),
    *rewrites_of(
        "src/http/endpoints.py",
        ("tests/http/embeddings/test_other_protocols.py",),
        (
            "clients that post to the server's own address find nothing",
            "ENDPOINTS",
            '("/embed", "/")',
            '("/embed",)',
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        _ENGINE,
        (
            "the sum of the chunks before is left out",
            "RowPooling._vector",
            "A = A + C if B else A",
            "",
        ),
        (
            "the mean is of the last chunk's tokens",
            "RowPooling._vector",
            "A + len(B)",
            "len(B)",
        ),
        (
            "the first token is that of the last chunk",
            "RowPooling._vector",
            "if A == 0:\n    B.copy_(C)",
            "B.copy_(C)",
        ),
        (
            "tokens of all rows are those of the first",
            "RowPooling.pool",
            "if A is not None and A.pooling is not None: B\nC = D",
            "if A is not None and A.pooling is not None: B",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        ("tests/engine/test_vectors_of_others.py",),
        (
            "vectors of a step go to its rows in another order",
            "Vectors.added_to",
            "dict(zip(A, B, strict=True))",
            "dict(zip(reversed(A), B, strict=True))",
        ),
        (
            "rows that are added in order share a sum",
            "RowPooling._vector",
            "A = self._rows_kept()[row]",
            "A = self._rows_kept()[0]",
        ),
        (
            "pieces of all rows are kept under the next one's name",
            "Vectors._numbers",
            "self.known[A] = B",
            "self.known[A + 1] = B",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        ("tests/engine/execution/test_pooling.py",),
        (
            "prompts are pooled, whatever the files say",
            "RowPooling.pool",
            "A.start - B.num_unpooled",
            "A.start",
        ),
        (
            "what is behind a prompt begins with each chunk",
            "RowPooling.pool",
            "B = max(B, 0)",
            "B = 0",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedder.py",
        ("tests/engine/test_unpooled_prompts.py",),
        (
            "a prompt's length has the special token at its end",
            "Embedder._num_unpooled",
            "len(A) - B",
            "len(A)",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        ("tests/engine/test_unpooled_prompts.py",),
        (
            "prompts have no vectors of their tokens",
            "EmbeddingRun._submission",
            "A != 'all'",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/pooling.py",
        ("tests/engine/execution/test_pooling.py",),
        (
            "groups begin where a chunk does",
            "add_in_order",
            "-A % GROUP",
            "0",
        ),
        (
            "a group that a chunk completes is added later",
            "add_in_order",
            "if A and (B + A) % GROUP == 0: C",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/observer.py",
        ("tests/engine/telemetry/test_metrics_of_vectors.py",),
        (
            "cached tokens of a vector's text count as computed",
            "EngineObserver.delivered",
            "if A.vector is not None:\n    B.record.cached_tokens = A.cached_tokens\n    C",
            "if A.vector is not None:\n    C",
        ),
        (
            "a vector has an output of some length",
            "EngineObserver.ended",
            "None if A.pooling is not None else A.max_tokens",
            "A.max_tokens",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        _HTTP,
        (
            "a failed text is not named",
            "EmbeddingRun._named",
            "A if self._num_texts > 1 else None",
            "None",
        ),
        (
            "a salt is passed over",
            "EmbeddingRun._submission",
            'self._options.get("cache_salt", "")',
            '""',
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        ("tests/engine/test_embedding_calls.py",),
        (
            "a full queue ends a call that has begun",
            "EmbeddingRun._queue_more",
            "not A and (not self._open)",
            "False",
        ),
        (
            "a call that has begun is drained between two of its texts",
            "EmbeddingRun._queue_more",
            "if not self._left: A",
            "self._on_queued()",
        ),
        (
            "texts that are not queued count in no queue",
            "EmbeddingRun._read",
            "reservation.add(len(A))",
            "",
        ),
        (
            "texts of a call that ended count as waiting",
            "EmbeddingRun.abort",
            "if self._reservation is not None: A",
            "",
        ),
        (
            "texts are tokenized past the deadline",
            "EmbeddingRun.prepare",
            "asyncio.timeout(A)",
            "asyncio.timeout(None)",
        ),
        (
            "an abort waits for a text that is tokenized",
            "EmbeddingRun.abort",
            "A.reschedule(0.0)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        _HEADS,
        (
            "tokens have results however many",
            "EmbeddingRun._add_values",
            "self.max_values is not None and self._num_values > self.max_values",
            "False",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/reranks.py",
        _HEADS,
        (
            "raw scores are probabilities all the same",
            "_rerank",
            "A is not False and (not B)",
            "A is not False",
        ),
        (
            "the worst document comes first",
            "_rerank",
            "(-A, B)",
            "(A, B)",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/classes.py",
        _HEADS,
        (
            "labels of a prediction are in the model's order",
            "_predictions",
            "A.likeliest_first()",
            "range(len(A.labels))",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/scores.py",
        _COSINES,
        (
            "a text is named by the other side",
            "with_sides",
            "A if B == 'query' else C",
            "C",
        ),
    ),
    *rewrites_of(
        "src/http/ranks/reranks.py",
        _COSINES,
        (
            "all documents are told whatever top_n",
            "_rerank",
            "A if B is None else C",
            "A",
        ),
        (
            "documents are told whatever return_documents",
            "_rerank",
            "if A is not None:\n    B = A",
            "",
        ),
    ),
    *rewrites_of(
        "src/http/embeddings/cohere.py",
        _OTHERS,
        (
            "a text is cut though nobody asked for it",
            "_kept",
            "-1 if A == 'END' else None",
            "-1",
        ),
        (
            "signed bytes of bits are one too large",
            "_signed",
            "A - 128",
            "A - 127",
        ),
    ),
    *rewrites_of(
        "src/http/embeddings/inference.py",
        _OTHERS,
        (
            "vectors are normalized where the checkpoint says so",
            "embed",
            "A is not False",
            "None",
        ),
    ),
    *rewrites_of(
        "src/http/server/call.py",
        ("tests/http/embeddings/test_waiting_answers.py::test_a_long_answer_is_sent_in_pieces",),
        (
            "a long answer is told to be as long as its first piece",
            "Call.answer_in_pieces",
            "len(A) < PIECE",
            "True",
        ),
    ),
    *rewrites_of(
        "src/http/server/held_answers.py",
        ("tests/http/server/test_held_answers.py",),
        (
            "answers that wait are held however much they are",
            "HeldAnswers.holding",
            "A and A + B > C",
            "False",
        ),
        (
            "one key's answers take the room of others",
            "HeldAnswers.holding",
            "A + B > C - D - B",
            "False",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/request_state.py",
        _ENGINE,
        (
            "a mean is taken behind a cached prefix",
            'self.prompt_logprobs is None and self.request.pooling in (None, "last")',
            "self.prompt_logprobs is None",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/planning.py",
        _ENGINE,
        (
            "a text of an encoder is cut to what is left of the step",
            "not self.limits.whole_prompts or len(state.token_ids) <= builder.budget",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedder.py",
        _ENGINE,
        (
            "what is cut loses the special token behind it",
            "Embedder.tokens",
            "A[: B - len(C)] + C",
            "A[:B]",
        ),
        (
            "a vector is not normalized",
            "Embedder.vector",
            "max(A, 1e-12)",
            "2",
        ),
        (
            "a vector is cut after it was normalized",
            "Embedder.vector",
            (
                "A = np.frombuffer(B, np.float32)[:C]\n"
                "if self.recipe.normalizes if N is None else N:\n"
                "    D\n"
                "    F"
            ),
            (
                "A = np.frombuffer(B, np.float32)\n"
                "if self.recipe.normalizes if N is None else N:\n"
                "    D\n"
                "    F\n"
                "A = A[:C]"
            ),
        ),
        (
            "a text may be one token too long",
            "Embedder._check_length",
            "A > B",
            "A > B + 1",
        ),
    ),
    *rewrites_of(
        "src/http/embeddings/inputs.py",
        _HTTP,
        (
            "one text more than the limit is taken",
            "given_texts",
            "len(A) > B",
            "len(A) > B + 1",
        ),
    ),
    *rewrites_of(
        "src/http/embeddings/handlers.py",
        _HTTP,
        (
            "all vectors have one number",
            "_pieces",
            'b\'{"object":"embedding","index":%d,"embedding":\' % A',
            'b\'{"object":"embedding","index":%d,"embedding":\' % 0',
        ),
    ),
    *rewrites_of(
        "src/models/families/roberta.py",
        ("tests/models/test_encoders.py",),
        (
            "positions begin at the padding token's id",
            "Roberta.describe",
            "A.count('pad_token_id') + 1",
            "A.count('pad_token_id')",
        ),
    ),
    *rewrites_of(
        "src/models/sentence_transformers.py",
        ("tests/models/test_sentence_transformers.py",),
        (
            "several poolings are one",
            "_pooling",
            "not isinstance(A, list) or len(A) != 1 or A[0] not in list(_POOLINGS)",
            "not isinstance(A, list) or A[0] not in list(_POOLINGS)",
        ),
        (
            "a module of anybody's is one of sentence-transformers'",
            "_kind",
            "A.partition('.')[0] != 'sentence_transformers' or B",
            "B",
        ),
    ),
    *rewrites_of(
        "src/ops/attention/spec.py",
        ("tests/ops/attention/test_spec.py::test_the_reference_is_the_softmax_written_out",),
        (
            "the last token that is seen is left out",
            "AttentionSpec.visible_end",
            "A + 1 + (self.ahead or 0)",
            "A + (self.ahead or 1)",
        ),
    ),
    *rewrites_of(
        "src/models/families/modernbert.py",
        ("tests/models/test_encoders.py",),
        (
            "a window is as wide on each side as it should be in sum",
            "ModernBert.describe",
            "A.integer('local_attention') // 2",
            "A.integer('local_attention')",
        ),
        (
            "windows rotate as layers with full attention do",
            "ModernBert.describe",
            "replace(A, rope=B, window=C, ahead=D)",
            "replace(A, window=C, ahead=D)",
        ),
    ),
    *rewrites_of(
        "src/models/families/gemma2.py",
        ("tests/models/test_encoders.py",),
        (
            "a window both ways is as wide on each side as it should be in sum",
            "_both_ways",
            "A.window // 2",
            "A.window",
        ),
    ),
    *rewrites_of(
        "src/models/families/family.py",
        ("tests/models/test_encoders.py",),
        (
            "a window both ways leaves out its farthest token",
            "both_ways",
            "A.window + 1",
            "A.window",
        ),
    ),
    *rewrites_of(
        "src/models/decoder.py",
        ("tests/models/test_encoders.py",),
        (
            "an encoder keeps the head of a decoder",
            "write_end",
            "if A.looks_ahead: B",
            "",
        ),
        (
            "the embedding is not normalized",
            "write_embedding",
            "if (A := B.embedding_norm_name) is not None: C",
            "",
        ),
    ),
    *rewrites_of(
        "src/models/vector_modules.py",
        ("tests/models/test_vector_modules.py",),
        (
            "a projection has no bias",
            "Dense.apply",
            "A.get('linear.bias')",
            "None",
        ),
        (
            "tensors of any shape are read",
            "_read",
            "if A != B: C",
            "",
        ),
        (
            "an activation of anybody's is one of torch's",
            "_activation",
            "not A.startswith('torch.nn.') or B",
            "B",
        ),
    ),
    *rewrites_of(
        "src/models/sentence_transformers.py",
        ("tests/models/test_vector_modules.py",),
        (
            "every projection reads hidden states",
            "_behind",
            "A[-1].outputs if A else B",
            "B",
        ),
    ),
    *rewrites_of(
        "src/models/generic/encoders.py",
        ("tests/engine/test_embedding_models.py",),
        (
            "kinds of tokens end with the longest text",
            "EncoderBody.options_of",
            "if A._takes_types: B",
            "",
        ),
    ),
    *rewrites_of(
        "src/models/generic/encoders.py",
        ("tests/models/test_generic.py",),
        (
            "every encoder of a known type is without a head",
            "encoder_class",
            "A is not None or is_pretrained(B) or is_without_head(B)",
            "True",
        ),
    ),
    *rewrites_of(
        "src/models/generic/loading.py",
        ("tests/models/test_generic.py",),
        (
            "heads of others' classes are passed over",
            "_class_of",
            "not is_without_head(A)",
            "False",
        ),
    ),
    *rewrites_of(
        "src/models/generic/masks.py",
        ("tests/models/test_generic.py",),
        (
            "a window of two sides leaves out the token itself",
            "reach_of",
            "A - B[0] + 1",
            "A - B[0]",
        ),
    ),
)
