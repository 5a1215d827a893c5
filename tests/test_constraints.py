"""Answers that obey a grammar: what they are, alone and in a batch, how they end, and what goes wrong."""

import json
import random
import threading
import time
import weakref

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

import qengine
from engine import constraints
from engine.constraints import FORCED_LETTERS, KEPT_BYTES, Constraint, Vocabulary
from engine.prefix import PAGE_TOKENS
from engine.request import GRAMMAR_LETTERS
from engine.tokenizer import ByteTokenizer, Tokenizer
from kernels.emulated.card import EmulatedCard
from kernels.records import CHECK_ROWS
from tests.models import SLOTS, TINY, load_tiny
from tests.schemas import random_object, random_schema

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
TOO_MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}


def json_grammar(schema):
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)


def request(seed=0, **fields):
    ids = np.random.default_rng(seed).integers(0, 4000, 10 + seed).tolist()
    return qengine.Request(ids, **{"temperature": 1.0, "seed": seed, "max_tokens": 300} | fields)


def text(deltas):
    return "".join(delta.text for delta in deltas)


# ---- without a model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte pairs", "bytes"])
def tokenizer(request):
    return ByteTokenizer(300) if request.param == "bytes" else qengine.open_model(TINY).tokenizer


def random_answer(constraint, tokenizer, rng):
    """Tokens that a constraint allows, each with the same probability."""
    tokens = []
    while not constraint.ended:
        if constraint.forced:
            tokens.append(constraint.forced[0])
        else:
            mask = np.frombuffer(constraint.matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:tokenizer.n_vocab])
            tokens.append(int(rng.choice(allowed)))
        if tokens[-1] in tokenizer.eos_ids:
            break
        constraint.take(tokens[-1])
        assert constraint.error is None
    return tokens


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_schema_allows_parses_and_validates(tokenizer, seed):
    rng = random.Random(seed)
    schema = random_schema(rng)
    constraint = Constraint(Vocabulary(tokenizer), json_grammar(schema))
    assert constraint.error is None, schema
    answer = tokenizer.decode(random_answer(constraint, tokenizer, rng))
    jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())


def test_forced_tokens_are_those_of_the_tokenizer(tokenizer):
    words = 'He said: "the quick brown fox".'
    vocabulary = Vocabulary(tokenizer)
    constraint = Constraint(vocabulary, LLMatcher.grammar_from_lark(f"start: {json.dumps(words)}"))
    assert list(constraint.forced) == tokenizer.encode(words)
    for token in tokenizer.encode(words):
        assert not constraint.ended
        constraint.take(token)
    assert constraint.ended and constraint.error is None


def test_a_long_forced_text_is_looked_at_piece_by_piece(tokenizer):
    words = "the quick brown fox, " * 1000
    constraint = Constraint(Vocabulary(tokenizer), LLMatcher.grammar_from_lark(f'start: "{words}"'))
    assert 100 < len(constraint.forced) <= FORCED_LETTERS
    assert tokenizer.decode(random_answer(constraint, tokenizer, random.Random(0))) == words


def test_a_vocabulary_with_a_space_before_every_text(tmp_path):
    """SentencePiece: forced text may be cut otherwise than by the tokenizer, but spells the same."""
    pieces = [b"<unk>", b"</s>", *(bytes([i]) for i in range(256)), b" the", b"the", b" fox", b"fox"]
    tokenizer = Tokenizer(pieces, {"<unk>": 0, "</s>": 1}, {}, [1])
    words = {" the fox": [258, 260], "the fox": [258, 260], " fox": [260], "fox": [260]}   # encoding adds a space
    tokenizer._encode_plain = lambda texts: [words.get(text, [258]) for text in texts]
    vocabulary = Vocabulary(tokenizer)
    constraint = Constraint(vocabulary, LLMatcher.grammar_from_lark('start: "the fox"'))
    assert constraint.error is None
    assert tokenizer.decode(random_answer(constraint, tokenizer, random.Random(0))) == "the fox"


def test_a_vocabulary_is_freed(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    constraint, gone = Constraint(vocabulary, json_grammar(PERSON)), weakref.ref(vocabulary)
    del vocabulary
    assert gone() and constraint.error is None
    del constraint
    assert gone() is None


# ---- answers -----------------------------------------------------------------------------------------------


def test_random_schemas_alone_and_side_by_side(engine):
    """Some unconstrained, greedy and drawn: the same deltas alone and together, and every whole answer validates."""
    rng, requests, schemas = random.Random(3), [], []
    for seed in range(10):
        schemas.append(random_object(rng) if seed % 3 else None)
        fields = {"max_tokens": 30} if seed % 3 == 0 else {"grammar": json_grammar(schemas[-1])}
        requests.append(request(seed, temperature=seed % 2, top_logprobs=3 if seed % 4 == 1 else None, **fields))
    alone = [list(engine.submit(r)) for r in requests]
    assert [list(g) for g in [engine.submit(r) for r in requests]] == alone
    n_whole = 0
    for schema, answer in zip(schemas, alone):
        if schema and answer[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(text(answer)), schema)
            n_whole += 1
    assert n_whole >= 4


def test_on_a_card_that_does_everything_late(engine):
    requests = [request(seed, grammar=json_grammar(PERSON) if seed % 2 else None, max_tokens=60) for seed in range(5)]
    want = [list(engine.submit(r)) for r in requests]
    late = load_tiny(EmulatedCard(late=True))
    assert [list(g) for g in [late.submit(r) for r in requests]] == want
    assert list(late.submit(requests[1])) == want[1]        # alone
    late.close()


WORDS = "the quick brown fox jumps over the lazy dog, "


@pytest.mark.parametrize("fields, is_cut", [
    ({}, False), ({"temperature": 0}, False), ({"grammar_after": 7, "logit_bias": {7: 100.0}}, False),
    ({"max_tokens": 21}, True), ({"stop": "lazy"}, True)], ids=str)
def test_forced_tokens_have_the_bits_of_steps_of_their_own(engine, monkeypatch, fields, is_cut):
    """Over the ends of pages, and what is drawn after them, too."""
    grammar, widths, forward = LLMatcher.grammar_from_regex(f"({WORDS}){{8}}[a-z ]{{30}}"), [], qengine.Pipeline.forward
    monkeypatch.setattr(qengine.Pipeline, "forward", lambda pipeline, shape, *rest: (
        widths.append(shape.width), forward(pipeline, shape, *rest))[1])

    def answer():
        engine.clear_cache()
        widths.clear()
        return list(engine.submit(request(**{"grammar": grammar, "draft": 0} | fields)))

    deltas = answer()
    assert max(widths) == CHECK_ROWS and len(widths) < (len(deltas) if is_cut else len(deltas) - 64)
    monkeypatch.setattr(qengine, "LEAST_FORCED", 1000)
    assert answer() == deltas and set(widths) == {1}


def test_a_page_that_is_full_with_the_last_forced_token_is_kept(engine, monkeypatch):
    grammar = LLMatcher.grammar_from_regex(f"({WORDS}){{2}}")

    def reused(n):
        """Tokens that a next turn need not process, of a prompt of n."""
        engine.clear_cache()
        ids = list(range(5, 5 + n))
        answer = [delta.token_id for delta in engine.submit(qengine.Request(ids, max_tokens=300, grammar=grammar))]
        after = engine.submit(qengine.Request([*ids, *answer, 9, 9], max_tokens=1))
        after.wait()
        return len(answer), after.n_cached

    n = 2 * PAGE_TOKENS + 1 - reused(5)[0]          # the last token of an answer is not processed
    cached = [reused(n + i)[1] for i in range(2)]
    monkeypatch.setattr(qengine, "LEAST_FORCED", 1000)
    assert cached == [reused(n + i)[1] for i in range(2)] and cached[0] == 2 * PAGE_TOKENS


def test_forced_text_is_decoded_where_each_token_counts(engine):
    """Where its log-probability is asked for or a penalty has to know of it, and among other answers."""
    grammar = LLMatcher.grammar_from_regex(f"{WORDS}[a-z]{{5}}")
    for fields in {"top_logprobs": 0}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}:
        assert text(engine.submit(request(grammar=grammar, **fields))).startswith(WORDS)
    other = engine.submit(request(1, max_tokens=400, ignore_eos=True))
    next(iter(other))
    assert text(engine.submit(request(grammar=grammar))).startswith(WORDS)
    other.cancel()
    other.wait()
    engine.clear_cache()        # comes after the step that took note of it


def test_masks_are_made_while_the_layers_run(engine, monkeypatch):
    order = []
    for owner, name in ((qengine.Pipeline, "forward"), (qengine.Tokens, "read"), (qengine.Pipeline, "constrain"),
                        (qengine.Pipeline, "choose")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments, name=name, original=original:
                            (order.append(name), original(*arguments))[1])
    list(engine.submit(request(grammar=LLMatcher.grammar_from_regex("[0-9]{4}"), max_tokens=4)))
    first, step = ["constrain", "read"], ["forward", "read", "constrain", "choose"]
    assert order[:2] == first and order[2:5] == ["forward", "constrain", "choose"]
    assert order[5:9] == step


def test_tags_are_tokens_and_text_never_spells_them(engine):
    tags = engine.tokenizer.tags
    grammar = LLMatcher.grammar_from_lark(
        'start: <think> /[a-z ]{1,20}/ </think> "\\n" ARGUMENTS\nARGUMENTS: /<think>[ab]{2}<\\/think>/')
    answer = list(engine.submit(request(grammar=grammar)))
    tokens = [delta.token_id for delta in answer]
    assert [tokens.count(tags[name]) for name in ("<think>", "</think>")] == [1, 1]
    assert text(answer).count("<think>") == 2 and answer[-1].finish_reason == "stop"


def test_a_grammar_that_rules_what_follows_a_token(engine):
    """The same tokens up to it as without a grammar, alone and beside others, and nothing where it does not come."""
    free = list(engine.submit(request(max_tokens=40, ignore_eos=True)))
    tokens = [delta.token_id for delta in free]
    at = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
    grammar = json_grammar(PERSON)
    ruled = request(max_tokens=200, ignore_eos=True, grammar=grammar, grammar_after=tokens[at])
    answer = list(engine.submit(ruled))
    assert [delta.token_id for delta in answer[:at + 1]] == tokens[:at + 1]
    jsonschema.validate(json.loads(text(answer[at + 1:])), PERSON)
    assert answer[-1].finish_reason == "stop"
    others = [request(1, max_tokens=30), request(2, max_tokens=50, grammar=grammar)]
    want = [list(engine.submit(r)) for r in others]
    assert [list(g) for g in [engine.submit(r) for r in (ruled, *others)]] == [answer, *want]
    never = next(token for token in range(4000) if token not in tokens)
    unruled = request(max_tokens=40, ignore_eos=True, grammar=grammar, grammar_after=never)
    assert list(engine.submit(unruled)) == free


def test_log_probabilities_are_those_before_the_mask(engine):
    """Of tokens that a grammar leaves no choice of, too."""
    free, = list(engine.submit(request(max_tokens=1, top_logprobs=5)))
    bound, = list(engine.submit(request(max_tokens=1, top_logprobs=5, grammar=json_grammar(PERSON))))
    assert bound.top_logprobs == free.top_logprobs and bound.token_id != free.token_id
    assert bound.logprob < free.top_logprobs[0][1]


# ---- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_that_is_complete_ends(engine, ignore_eos):
    answer = list(engine.submit(request(grammar=json_grammar({"enum": ["red"]}), ignore_eos=ignore_eos)))
    assert text(answer) == '"red"' and answer[-1].finish_reason == "stop"
    assert answer[-1].token_id not in engine.tokenizer.eos_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_that_may_be_complete_ends_with_an_end_token(engine, ignore_eos):
    bias = {token: 100.0 for token in engine.tokenizer.eos_ids}
    answer = list(engine.submit(request(grammar=LLMatcher.grammar_from_regex("a+"), logit_bias=bias,
                                          ignore_eos=ignore_eos)))
    assert text(answer) == "a" and answer[-1].finish_reason == "stop"
    assert answer[-1].token_id in engine.tokenizer.eos_ids


def test_an_answer_that_is_too_long_is_cut(engine):
    grammar = LLMatcher.grammar_from_regex("[a-z]{200}")
    answer = list(engine.submit(request(grammar=grammar, max_tokens=7)))
    assert len(answer) == 7 and answer[-1].finish_reason == "length"


# ---- the same grammar again --------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_every_answer_follows_it_from_the_start(engine, monkeypatch):
    compiled, compile_grammar = [], constraints.compile_grammar
    monkeypatch.setattr(constraints, "compile_grammar", lambda prepared, grammar: (
        compiled.append(grammar), compile_grammar(prepared, grammar))[1])
    fresh = load_tiny(engine.cards[0])
    requests = [request(seed, grammar=json_grammar(PERSON)) for seed in range(4)]
    want = [list(engine.submit(r)) for r in requests]
    assert [list(fresh.submit(r)) for r in requests] == want                       # one after the other
    assert [list(g) for g in [fresh.submit(r) for r in requests]] == want          # side by side
    assert compiled == [json_grammar(PERSON)]
    for _ in range(2):                          # what is refused is refused again
        with pytest.raises(qengine.RequestError, match="Expected token"):
            fresh.submit(request(grammar="nonsense"))
    assert len(compiled) == 1                   # because a trial has refused it
    kept = fresh.vocabulary.compile(json_grammar(PERSON))
    kept.n_tokens = KEPT_BYTES                  # so many tokens may have left more than may be kept
    other = fresh.vocabulary.compile(LLMatcher.grammar_from_regex("a"))
    assert list(fresh.vocabulary.kept.values()) == [other]
    list(fresh.submit(requests[0]))
    assert len(compiled) == 3
    fresh.close()


# ---- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar, words", [
    ("", "Empty grammar"), ("nonsense", "Expected token"), ("start: <nope>", "unknown special token"),
    (LLMatcher.grammar_from_regex("a(?=b)"), "look-around"),
    (LLMatcher.grammar_from_json_schema("{"), "line 1"),
    pytest.param(f'start: "{"a" * GRAMMAR_LETTERS}"', "has 262153 letters, and may have 262144", id="too long"),
    (json_grammar({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (json_grammar({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "nothing that it allows can follow"),
    *((json_grammar(schema), keyword) for keyword, schema in {
        "not": {"not": {"type": "string"}}, "uniqueItems": {"type": "array", "uniqueItems": True},
        "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
        "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
        "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
        "my-format": {"type": "string", "format": "my-format"}}.items()),
    (7, "must be a text"),
], ids=str)
def test_grammars_that_are_refused(engine, grammar, words):
    with pytest.raises(qengine.RequestError, match=words) as caught:
        engine.submit(request(grammar=grammar))
    assert caught.value.field == "grammar"


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(engine):
    others = [request(seed, grammar=json_grammar(PERSON) if seed == 2 else None, max_tokens=40) for seed in (1, 2)]
    want = [list(engine.submit(r)) for r in others]
    grammar = LLMatcher.grammar_from_lark("start: /[a-z]{6}/ %json " + json.dumps(TOO_MANY))
    broken, *others = [engine.submit(r) for r in (request(3, grammar=grammar), *others)]
    with pytest.raises(qengine.RequestError, match="items; max is") as caught:
        list(broken)
    assert caught.value.field == "grammar" and "verbose" not in str(caught.value)
    assert 0 < broken.n_generated < 10
    assert [list(g) for g in others] == want
    assert engine.reason is None and len(engine.scheduler.free_slots) == SLOTS


AMBIGUOUS = 'start: e\ne: e e | "a" | e "a" e | ""'
MADE_TO_BE_SLOW = {
    "states": json_grammar({"type": "string", "pattern": "^(a|b)*a(a|b){500}$"}),
    "gaps": json_grammar({"type": "string", "pattern": "^" + ".*a" * 60 + "$"}),
    "alternatives": json_grammar({"anyOf": [{"type": "string", "pattern": f"^[a-z ]*{i}[a-z0-9 ]*$"}
                                            for i in range(300)]}),
    "ambiguous": LLMatcher.grammar_from_lark(AMBIGUOUS),
    "forced": LLMatcher.grammar_from_lark(f'start: /[a-z]/ "{"hello world, " * 20_000}"')}


@pytest.mark.parametrize("name", MADE_TO_BE_SLOW)
def test_no_grammar_holds_the_scheduler(name):
    """Once a grammar is accepted, a token under it takes a fraction of a second at worst, or ends its answer."""
    tokenizer, rng = qengine.open_model(qengine.DEFAULT_MODEL).tokenizer, random.Random(0)
    constraint, longest, answer = Constraint(Vocabulary(tokenizer), MADE_TO_BE_SLOW[name]), 0, []
    while len(answer) < 100 and not constraint.ended and constraint.error is None:
        started = time.thread_time()
        mask = np.frombuffer(constraint.matcher.compute_bitmask(), np.uint8)
        masked = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:tokenizer.n_vocab])
        answer.append(constraint.forced[0] if constraint.forced else rng.choice(allowed))
        chosen = time.thread_time()
        constraint.take(int(answer[-1]))
        longest = max(longest, masked - started + time.thread_time() - chosen)
    assert answer and longest < 1       # 0.1 s


def test_requests_from_many_threads(engine):
    """The vocabulary is made once or twice, and every thread has its own matcher."""
    fresh = load_tiny(engine.cards[0])
    want, found = list(engine.submit(request(grammar=json_grammar(PERSON)))), []
    threads = [threading.Thread(target=lambda: found.append(list(fresh.submit(request(grammar=json_grammar(PERSON))))))
               for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 6
    fresh.close()
