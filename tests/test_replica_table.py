"""What replicas need and Ray does not: marks of prompts, which replica a request goes to, what crosses the network, how
an answer begins again, and the options. No cluster is started."""

import pickle
import random
import subprocess
import sys
import threading

import pytest

from benchmarks import replica_simulation as simulation
from cli.options import build_parser, check_options
from cli.replicas import card_of
from engine import replicas
from engine.prefix import PAGE_TOKENS, marks_of
from engine.replicas import front, table, wire
from engine.replicas.jobs import Differs, RemoteAnswer, RemoteTexts
from engine.replicas.table import AWAY, Table
from engine.pooling import TextsJob, TextsRequest
from engine.request import (Answer, ContextExceeded, DeadlineExceeded, Delta, EngineStopped, Generation, Request,
                            RequestError, Timings, share_read)
from engine.served import Facts
from tests.models import TINY
from tests.scripted import ScriptedEngine, shipped
from tests.test_cli import run
from tests.tiny import ROOT
from tests.until import wait_until

PAGE = list(range(PAGE_TOKENS))


# ---- marks ---------------------------------------------------------------------------------------------------------


def test_marks_stand_for_beginnings():
    assert marks_of(PAGE[:-1]) == [] and marks_of([]) == []
    one, two = marks_of(PAGE + PAGE + [5])
    assert marks_of(PAGE) == [one] and marks_of(PAGE + PAGE[::-1])[0] == one != two
    assert len({*marks_of(PAGE * 50), *marks_of([1] + PAGE * 50)}) == 100
    picture = [1 << 190] * PAGE_TOKENS          # keys of a picture's tokens are large
    assert marks_of(picture) != marks_of([1 << 189] * PAGE_TOKENS)


def test_marks_are_the_same_in_every_process():
    code = "from engine.prefix import marks_of; print(marks_of(list(range(300))))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert said == f"{marks_of(list(range(300)))}\n"


def test_an_engine_tells_the_marks_of_what_it_keeps(engine):
    engine.clear_cache()
    ids = list(range(20, 220))
    engine.submit(Request(ids, max_tokens=1)).wait()
    kept = engine.marks()
    assert set(kept) <= {0, *marks_of(ids)} and marks_of(ids)[2] in kept
    engine.clear_cache()
    assert engine.marks() == []


# ---- the table -----------------------------------------------------------------------------------------------------


def facts(n_slots=4):
    return {"node": "10.0.0.1", "hostname": "a", "n_slots": n_slots, "cards": ["a card"], "layers": [(0, 4)]}


def table_of(*ids, n_slots=4):
    found = Table()
    assert found.see(ids) == (sorted(ids), [])
    for id in ids:
        found.report(id, facts(n_slots), {}, None, [])
    return found


def test_a_request_goes_where_most_is_cached():
    one, ids = table_of("a", "b", "c"), "abc"
    one.report("b", None, None, None, [1, 2])
    one.report("c", None, None, None, [1, 2, 3])
    assert one.rank([1, 2, 3, 4], ids)[:2] == ["c", "b"]
    assert one.rank([1, 2, 9, 9], ids)[2] == "a" and one.n_spared("c", [1, 2, 3, 4]) == 3 * PAGE_TOKENS
    one.report("c", None, None, None, [7])      # what was kept is dropped
    assert one.rank([1, 2, 3, 4], ids)[0] == "b" and one.n_spared("c", [1, 2, 3]) == 0


def test_a_prompt_that_is_on_its_way_counts():
    one = table_of("a", "b")
    opened = one.take("a", [7, 8, 9]), one.take("b", [1, 2, 3])
    assert [each.n_unread for each in opened] == [3 * PAGE_TOKENS] * 2
    assert one.rank([1, 2, 3], "ab")[0] == "b" and one.rank([7, 8, 9], "ab")[0] == "a"
    for each in opened:
        one.give_back(each)
    assert one.n_spared("b", [1, 2, 3]) == 0 and one.holders == {}


def test_who_reads_a_long_prompt_is_left_alone():
    one, long = table_of("a", "b"), list(range(100, 150))
    one.report("a", None, None, None, [1, 2, 3])
    opened = one.take("a", long)
    assert opened.n_unread == 50 * PAGE_TOKENS and one.rank([1, 2, 3], "ab")[0] == "b"
    one.has_read(opened)                        # it goes on to answer
    assert one.rank([1, 2, 3], "ab")[0] == "a"
    one.give_back(opened)
    assert one.replicas["a"].n_unread == one.replicas["a"].n_open == 0
    one.report("a", None, None, None, [1, 2, 3, long[40]])
    assert one.take("a", long).n_unread == 9 * PAGE_TOKENS      # the others are spared


def test_what_was_not_counted_is_not_taken_away():
    """Requests at a replica that is not known yet, or that was forgotten and has come back."""
    one = table_of("a")
    early = one.take("b", [1])
    one.see(["a", "b"])
    late = one.take("a", [1, 2])
    one.forget("a")
    one.see(["a", "b"])
    for each in early, late:
        one.give_back(each)
    assert [(each.n_open, each.n_unread) for each in one.listed()] == [(0, 0)] * 2 and one.holders == {}


def test_short_beginnings_do_not_gather_all_requests():
    one, sent = table_of("a", "b", "c"), []
    for _ in range(9):
        sent.append(one.rank([1], "abc")[0])    # one page in common
        one.take(sent[-1], [1])
    assert sorted(map(sent.count, "abc")) == [3, 3, 3] and AWAY >= PAGE_TOKENS


def test_nobody_gets_more_than_a_share_but_free_slots_are_used():
    one, marks = table_of("a", "b", n_slots=2), list(range(1, 200))
    one.report("a", None, None, None, marks)
    sent = []
    for _ in range(12):
        sent.append(one.rank(marks, "ab")[0])
        one.take(sent[-1], [])
    assert sent[:2] == ["a", "a"] and 6 <= sent.count("a") <= 8


def test_equals_take_turns():
    one = table_of(*"abcd")
    assert len({one.rank([], "abcd")[0] for _ in range(4)}) == 4


def test_who_is_silent_or_has_failed_gets_nothing():
    one = table_of("a", "b")
    one.silence("a")
    assert one.rank([], "ab") == ["b"] and one.listed()[0].state == "silent"
    one.fail("b", "broken")
    assert one.rank([], "ab") == [] and one.listed()[1].state == "failed"
    one.report("a", None, None, None, None)     # it was only slow
    assert one.rank([], "ab") == ["a"] and one.listed()[0].state == "up"


def test_who_has_another_vocabulary_gets_nothing():
    one = table_of("a", "b")
    one.exclude("a")
    one.report("a", None, None, None, [1])
    assert one.rank([1], "ab") == ["b"] and one.listed()[0].state == "foreign"


def test_who_comes_and_goes():
    one = table_of("a", "b")
    assert one.see(["b", "c"]) == (["c"], ["a"]) and one.see(["b", "c"]) == ([], [])
    assert {each.id: each.state for each in one.listed()} == {"a": "leaving", "b": "up", "c": "starting"}
    opened = one.take("a", [1])
    one.forget("a")
    one.give_back(opened)                       # comes late
    assert one.holders == {} and "a" not in one.replicas


def test_who_comes_back_leaves_no_more():
    one = table_of("a", "b")
    assert one.see(["b"]) == ([], ["a"]) and one.see(["a", "b"]) == ([], [])
    assert [each.state for each in one.listed()] == ["up", "up"]
    assert one.see(["b"]) == ([], ["a"])        # and may leave again


def test_counts_of_replicas_that_are_gone_stay():
    one = table_of("a", "b")
    one.report("a", None, {"prompt_tokens": 5, "requests_running": 2, "drafts_checked": (1, 2)}, None, None)
    one.report("b", None, {"prompt_tokens": 7, "requests_running": 1, "drafts_checked": (3, 0)}, None, None)
    assert one.stats() == {"prompt_tokens": 12, "requests_running": 3, "drafts_checked": (4, 2)}
    one.forget("a")
    assert one.stats() == {"prompt_tokens": 12, "requests_running": 1, "drafts_checked": (4, 2)}


def test_marks_of_a_replica_are_bounded(monkeypatch):
    monkeypatch.setattr(table, "MOST_MARKS", 10)
    one = table_of("a")
    one.report("a", None, None, None, list(range(1000)))
    assert len(one.holders) == 10


def test_the_account_is_right_whatever_happens():
    rng, one, ids, open_ = random.Random(3), table_of(*"abcd"), "abcd", []
    for _ in range(2000):
        if rng.random() < 0.5 or not open_:
            marks = rng.choices(range(30), k=rng.randint(0, 6))
            id = one.rank(marks, ids)[0]
            open_.append(one.take(id, marks))
        elif rng.random() < 0.3:
            one.has_read(rng.choice(open_))
        elif rng.random() < 0.8:
            one.give_back(open_.pop(rng.randrange(len(open_))))
        else:
            one.report(rng.choice(ids), None, None, None, rng.sample(range(30), rng.randint(0, 9)))
    for each in one.listed():
        assert each.n_open == sum(opened.replica is each for opened in open_)
        assert each.n_unread == sum(opened.n_unread for opened in open_ if opened.replica is each)
    for opened in open_:
        one.give_back(opened)
    for id in ids:
        one.report(id, None, None, None, [])
    assert one.holders == {} and all(each.n_open == each.n_unread == 0 for each in one.listed())


# ---- on the wire ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ContextExceeded(10, 5), RequestError("grammar", "it is wrong"),
                                   DeadlineExceeded("too late"), EngineStopped("a card broke")], ids=str)
def test_errors_travel(error):
    told = pickle.loads(pickle.dumps(wire.error_told(error)))
    heard = wire.error_heard(told)
    assert type(heard) is type(error) and str(heard) == str(error) and vars(heard) == vars(error)


def test_mistakes_of_a_replica_are_not_told_in_words():
    assert wire.error_told(ValueError("secret")) == ("stopped", None, "the replica has made a mistake")


def test_requests_travel():
    request = Request([1, 2], stop="x", logit_bias={3: -100.0}, grammar="g", timeout=3.0)
    assert wire.unpacked(wire.packed(request)) == request


# ---- answers that begin again --------------------------------------------------------------------------------------


NONE = *(0,) * len(wire.COUNTS), None


class NoLink:
    def drop(self, job):
        self.dropped = job


def deltas(*texts):
    return [wire.delta_told(Delta(i, text, "stop" if i == len(texts) - 1 else None)) for i, text in enumerate(texts)]


def test_an_answer_that_begins_again_says_nothing_twice():
    job = RemoteAnswer(Request([1]), NoLink(), [])
    first_id, said = job.id, deltas("a", "b", "c")
    job.hear(NONE, said[:2])
    job.begin_again()
    job.hear(NONE, said[:1])
    job.hear(NONE, said[1:])
    job.end()
    assert [delta.text for delta in job] == ["a", "b", "c"] and job.n_generated == 3 == len(job.token_times)
    assert job.id != first_id and job.finish_reason == "stop"


def test_an_answer_that_begins_again_otherwise_is_no_answer():
    job = RemoteAnswer(Request([1]), NoLink(), [])
    job.hear(NONE, deltas("a", "b", "c")[:2])
    job.begin_again()
    with pytest.raises(Differs):
        job.hear(NONE, deltas("a", "x", "c"))


def test_cancelling_reaches_the_link():
    link = NoLink()
    for job in RemoteAnswer(Request([1]), link, []), RemoteTexts(TextsRequest([[1]]), link):
        job.cancel()
        assert link.dropped is job and job.cancelled and job.overdue() is None


def test_counts_and_times_reach_the_front():
    near, job = Answer(Request([1] * 9)), RemoteAnswer(Request([1] * 9), NoLink(), [])
    near.n_read, near.n_cached, near.keys_read, near.keys_seen = 9, 4, 30, 120
    near.waited, near.first_after, near.last_after, near.n_generated = 0.25, 1.5, 1.5, 1
    job.hear(pickle.loads(pickle.dumps(wire.counts_told(near))), deltas("a"))
    assert vars(job).items() >= {name: getattr(near, name) for name in wire.COUNTS}.items()
    assert share_read([job]) == share_read([near]) == 0.25
    assert job.timings() == near.timings() == Timings(0.25, 1.25, 0, 4, None)    # those of the replica's clock
    job.begin_again()
    job.hear((3, *NONE[1:]), [])                # the next replica has not read the prompt yet
    assert (job.n_read, job.n_cached) == (9, 0) and share_read([job]) is None
    assert wire.counts_told(TextsJob(TextsRequest([[1]]))) == NONE


def test_the_wait_in_the_front_is_part_of_the_times():
    """Until a replica was chosen: it measures from when it has got the request."""
    near, job = Answer(Request([1] * 9)), RemoteAnswer(Request([1] * 9), NoLink(), [])
    near.waited, near.n_generated, job.sent_after = 0.25, 1, 10.0
    job.hear(wire.counts_told(near), [])
    assert (job.waited, job.first_after) == (10.25, 0)      # there is no token yet
    near.first_after, near.last_after = 1.5, 2.5
    job.hear(wire.counts_told(near), deltas("a", "b"))
    assert job.timings() == Timings(10.25, 1.25, 1.0, 9 / 1.25, 1.0)


def test_drafts_come_with_the_tokens_that_they_gave():
    """A reader that has the last token knows them, though the end has not come."""
    near, job = Generation(Request([1]), shipped().tokenizer), RemoteAnswer(Request([1]), NoLink(), [])
    assert wire.counts_told(near)[-1] is None
    near.drafts.land(3, 2)
    job.hear(pickle.loads(pickle.dumps(wire.counts_told(near))), deltas("a"))
    assert (job.drafts.n_checked, job.drafts.n_accepted) == (near.drafts.n_checked, near.drafts.n_accepted)
    assert sum(job.drafts.n_checked) == 3 and not job.wait(0)
    job.begin_again()
    assert not any(job.drafts.n_checked)


@pytest.mark.parametrize("wish, asked, found", [("ask", True, True), ("on", None, True), ("ask", None, False),
                                                ("off", None, False), ("off", True, None)])
def test_a_front_checks_what_the_replicas_were_loaded_for(wish, asked, found):
    class Sent(NoLink):
        def be_of(self, vocabulary):
            pass

        def submit(self, job):
            self.job = job

    link = Sent()
    facts = {"n_ctx": 100, "n_dims": 0, "limits": None, "sparse": wish}
    engine = front.ReplicatedText(link, Facts.of(ScriptedEngine()), facts)
    if found is None:
        with pytest.raises(RequestError, match="without --sparse"):
            engine.submit(Request([20], sparse=asked))
        assert not hasattr(link, "job")         # nothing was sent
    else:
        assert engine.submit(Request([20], sparse=asked)).is_sparse is found


# ---- a front without replicas --------------------------------------------------------------------------------------


class Late:
    """A lock that one thread gets only when it may."""

    def __init__(self, lock):
        self.lock, self.late, self.arrived, self.may = lock, None, threading.Event(), threading.Event()

    def __enter__(self):
        if threading.current_thread() is self.late:
            self.arrived.set()
            assert self.may.wait(60)
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


class Calls:
    """A handle of Ray Serve whose calls fail, each as `how(link, id)` says: it may choose a replica first."""

    def __init__(self, how):
        self.how, self.n, self.answer = how, 0, self

    def remote(self, id, *_):
        self.n += 1
        self.how(self.link, id)
        raise ConnectionError("the cluster does not answer")

    def shutdown(self):
        pass


def test_what_comes_while_a_front_closes_does_not_wait_for_ever():
    link, said = front.Link(Calls(None), "closing"), []
    link.lock = gate = Late(link.lock)
    job = RemoteAnswer(Request([1]), link, [])

    def submit():
        try:
            link.submit(job)
        except EngineStopped as error:
            said.append(str(error))

    gate.late = threading.Thread(target=submit)
    gate.late.start()
    assert gate.arrived.wait(60)
    link.close()
    gate.may.set()
    gate.late.join(60)
    assert said == ["the server is shutting down"] and not link.jobs and link.loop.is_closed()
    job.cancel()                                # too late for the loop, and no error
    link.close()


@pytest.mark.parametrize("how, n, says", [
    (lambda link, id: None, 5, "no replica could be asked: the cluster does not answer"),
    (lambda link, id: link.placed(id, "a"), 3, "3 replicas were lost"),
    (lambda link, id: link.handle.n % 2 and link.placed(id, "a"), 5, "3 replicas were lost")])
def test_only_tries_that_had_a_replica_count_as_lost_ones(monkeypatch, caplog, how, n, says):
    monkeypatch.setattr(front, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(front, "MOST_FAILED", 5)
    calls = Calls(how)
    calls.link = link = front.Link(calls, "failing")
    job = RemoteAnswer(Request([1]), link, [])
    try:
        link.submit(job)
        assert job.wait(60) and says in str(job.error) and calls.n == n and not link.jobs
        gave_up, = (record.getMessage() for record in caplog.records if record.getMessage().startswith("gave up"))
        assert says in gave_up and str(job.tries[-1]) in gave_up and "the call failed (the cluster does" in gave_up
    finally:
        link.close()


def test_tries_are_no_busy_loop_and_end_with_their_request(monkeypatch):
    monkeypatch.setattr(front, "AGAIN_SECONDS", 3600)
    calls = Calls(lambda link, id: None)
    calls.link = link = front.Link(calls, "pausing")
    job = RemoteAnswer(Request([1]), link, [])
    try:
        link.submit(job)
        wait_until(lambda: job.n_failed, 60)
        job.cancel()                            # in the pause
        assert job.wait(60) and calls.n == 1 and job.error is None and not link.jobs
    finally:
        link.close()


# ---- options -------------------------------------------------------------------------------------------------------


def parsed(*arguments):
    parser = build_parser()
    options = parser.parse_args(["--serve", "0", *arguments])
    check_options(parser, options)
    return options


def test_replicas_as_they_are_written(capsys):
    assert parsed("--ray", "local").replicas == (1, 1) and parsed("--ray", "auto", "--replicas", "3").replicas == (3, 3)
    several = parsed("--ray", "auto", "--replicas", "2", "-m", "a=a.gguf,replicas=1,4", "-m", "b=b.gguf")
    assert [own.replicas for own in several.each] == [(1, 4), (2, 2)]
    assert parsed("--ray", "auto", "--replicas", "0").replicas == (0, 0)
    for wrong in (["--replicas", "2"], ["--ray", "x", "--replicas", "3,1"], ["--ray", "x", "--replicas", "0,2"],
                  ["--replicas", "0"], ["--ray", "x", "-m", "a=a.gguf,replicas=0"],
                  ["--ray", "x", "--replicas", "1,2,3"], ["--ray", "x", "--replicas", "1,1001"],
                  ["--ray", "x", "--go-on"], ["--ray", "x", "-m", "a=a.gguf,idle=1m"],
                  ["--ray", "x", "--embedding-model", "e.gguf"]):
        with pytest.raises(SystemExit):
            parsed(*wrong)
        assert capsys.readouterr().err.startswith("qengine: ")


@pytest.mark.parametrize("named, n_there, found", [
    (None, 0, ("emulated", 0)), (None, 4, ("cuda:0", 1)), ("cuda:3", 4, ("cuda:0", 1)),
    ("cuda:2,5", 8, ("cuda:0,1", 2)), ("emulated:2", 4, ("emulated:2", 0))])
def test_cards_become_what_ray_gives(named, n_there, found):
    assert card_of(named, n_there) == found


@pytest.mark.parametrize("named", ["cuda", "cuda:", "gpu:0"])
def test_replicas_need_a_number_of_cards(named):
    with pytest.raises(RequestError, match="name as many cards"):
        card_of(named, 4)


def test_without_ray_there_is_a_sentence(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith(("engine.replicas.cluster", "engine.replicas.actor"))]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(replicas, name.rpartition(".")[2])     # or the package would still give it
    code, _, err = run(capsys, "-m", TINY, "--serve", "0", "--ray", "local")
    assert code == 2 and "pip install -r requirements-ray.txt" in err and "Traceback" not in err


def test_what_a_front_needs_imports_no_ray():
    code = "import sys, cli.replicas, engine.replicas.front; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- the simulation ------------------------------------------------------------------------------------------------


def test_the_choice_by_marks_spares_more_in_the_simulation():
    found = {way: simulation.simulate(way, 8, 800) for way in ("random", "fewest", "table")}
    assert found["table"]["cached"] > found["fewest"]["cached"] + 0.1
    assert found["table"]["first token, s"]["95 %"] < found["random"]["first token, s"]["95 %"]
