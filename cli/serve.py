"""A server on the command line: it listens, loads, serves, and may go on when a card fails."""

import contextlib
import errno
import gc
import socket
import time
import weakref

import qengine
from api.access import is_loopback, is_secret, read_keys, read_origin
from api.http import serving
from api.log import on_stderr
from api.service import MAX_WAITING, Service, create_app
from api.tls import read_certificate
from engine.request import Fault, ModelError, RequestError
from engine.served import Models
from kernels.card import CardError
from kernels.compile import CompileError

from .engines import asked, traced
from .interrupts import endable, handle_ending, leave_ended
from .named import is_several
from .models import freeze, load_models, open_models


def run_server(options) -> int:
    """Listens, loads, and serves; or ends replicas, where there are to be none. SIGTERM and SIGHUP let open requests go
    on for --drain seconds, Ctrl-C does not; then what is left of them is cancelled, and their clients are told."""
    endable()
    if options.replicas == (0, 0):
        from .replicas import end_replicas      # here: what it imports may not be installed
        return end_replicas(options.ray)
    keys = read_keys(options.api_key, options.api_key_file)
    origins = [read_origin(text) for text in options.cors]
    tls = read_certificate(options.tls_cert, options.tls_key) if options.tls_cert else None
    app = create_app(max_requests=slots_of(options) + MAX_WAITING, keys=keys,
                     origins=origins, host=options.host, log_prompts=options.log_prompts,
                     fetches=options.allow_image_urls)
    service = app.extensions["qengine"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_stderr(service.log))
        try:
            port = stack.enter_context(serving(app, options.host, options.serve, tls))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            is_host = isinstance(error, (socket.gaierror, ValueError)) or error.errno == errno.EADDRNOTAVAIL
            way_out = "--host takes an address of this machine" if is_host else "--serve PORT takes another"
            qengine.note(f"qengine: cannot listen on {options.host} port {options.serve}: {reason} ({way_out})")
            return 2
        if not keys and not is_loopback(options.host):
            qengine.note(f"warning: whoever reaches {options.host} can use this server: --api-key asks for a key")
        if "*" in origins and not keys:
            qengine.note("warning: every web page that a user of this machine opens can use this server: --cors can "
                         "name pages, and --api-key asks for a key")
        for text, origin in zip(options.cors, origins):
            if text != origin:
                qengine.note(f"--cors {text}: browsers send this origin as {origin}, so that may ask")
        for path in filter(None, [tls and options.tls_key, options.api_key_file]):
            if not is_secret(path):
                qengine.note(f"warning: other users of this machine can read {path}")
        service.models = models = load_all(options)     # from now on the service answers
        for one in models.served:
            if "thinking_budget" in one.defaults.sampling and "</think>" not in one.facts.tokenizer.tags:
                qengine.note(f"warning: --thinking-budget has no effect on {one.name}, which has no </think> as one "
                             "token")
        stack.enter_context(traced(service.engine, options))
        try:
            scheme = "https" if tls else "http"
            addresses = " and ".join(f"{scheme}://{name}:{port}/" for name in names_of(options.host))
            qengine.note(f"serving {models.first.name} on {addresses} (a page to talk with it, and /v1 for programs; "
                         "Ctrl-C stops)")
            for one in models.served[1:]:
                qengine.note(f"beside it: {one.name}, {one.kind}" + ", loaded when asked for" * bool(one.load))
            if is_several(options) or options.ray:
                watch(models)
            work(service, options)
        except SystemExit:
            drain(service, options.drain)
            raise
        finally:
            handle_ending(leave_ended)      # nothing is left to end but this
            stack.close()
            models.close()
            if options.ray not in (None, "local"):
                qengine.note("the replicas go on, and the same command finds them again; --replicas 0 ends them")


def work(service: Service, options):
    """Waits, and starts another engine when a card fails and --go-on says so. Ends by an exception only."""
    is_working = True
    while is_working:
        freeze()
        service.engine.scheduler.thread.join()  # ends by a failure only; /health goes on to tell of it
        gc.unfreeze()
        qengine.note(f"qengine: {service.engine.reason}")
        is_working = options.go_on and go_on(service, options)
    while True:
        time.sleep(3600)


EVERYWHERE = {"0.0.0.0": ("127.0.0.1", "192.0.2.1"), "::": ("::1", "2001:db8::1")}      # this machine, a far one


def names_of(host: str) -> list[str]:
    """How the server is called in addresses, where it listens on `host`: on this machine, and on others if that is
    another name."""
    if host not in EVERYWHERE:
        return [in_address(host)]
    own, far = EVERYWHERE[host]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))             # sends nothing, and chooses the network
            return [in_address(own), in_address(probe.getsockname()[0])]
        except OSError:                         # there is no network
            return [in_address(own), socket.gethostname()]


def in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def load_all(options) -> Models:
    """The models of the server, in this process or as replicas. Raises ModelError, RequestError, CardError."""
    if not options.ray:
        return load_models(open_models(options), free)
    from .replicas import load_replicas     # here: what it imports may not be installed
    models = load_replicas(options)
    endable()                               # Ray takes the signals for itself
    return models


def slots_of(options) -> int:
    """How many answers all models together generate at the same time, at most."""
    return sum(own.slots * max(own.replicas) for own in (options.each if is_several(options) else [options]))


def watch(models: Models):
    """Waits, and tells of models that fail; the others go on. Ends by an exception only."""
    freeze()
    told = weakref.WeakSet()
    while True:
        time.sleep(1)
        for engine in models.engines:
            if engine.reason is not None and engine not in told:
                told.add(engine)
                qengine.note(f"qengine: {engine.name}: {engine.reason}")


def drain(service: Service, seconds: float):
    """Lets open requests go on for so many seconds. Another SIGTERM or SIGHUP, or Ctrl-C, ends the wait."""
    endable()
    if n := len(service.open):
        qengine.note(f"draining: {n} running or waiting; {seconds:g} seconds for {'it' if n == 1 else 'them'}, "
                     "and a second signal ends this")
    service.drain(seconds)


def go_on(service: Service, options) -> bool:
    """Gives the service, whose engine has failed, another engine on the cards that are left: all cards that were
    opened, without those that have failed, also while the new engine is loaded. Returns whether there is one."""
    failed, fault = service.engine, service.engine.fault
    left = failed.cards + failed.spare
    service.is_loading = True
    free(failed)
    try:
        while fault.card is not None:
            service.lost.append(fault)
            left = [card for card in left if card.name != fault.card]
            if not left:
                raise CardError("no card is left")
            gc.collect()                # tracebacks still hold memory of the failed engine
            try:
                move_side(service, fault.card, left)
                engine = qengine.load(failed.opened, left, **asked(options) | {"split": None})
            except CardError as error:
                if error.card is None:
                    raise
                qengine.note(f"qengine: {error}")
                fault = Fault.of(error)
            else:
                service.models.replace(failed, engine)
                qengine.note(f"going on with {', '.join(card.name for card in engine.cards)}")
                return True
        raise CardError("no card is known to be at fault")
    except (CardError, CompileError, ModelError, RequestError) as error:
        qengine.note(f"qengine: cannot go on: {error}")
        return False
    finally:
        service.is_loading = False


def free(engine):
    """Closes an engine and gives back the memory of its stages."""
    engine.close()
    for stage in engine.pipeline.stages:
        stage.release()


def move_side(service: Service, lost: str, cards: list):
    """Loads the models beside the main one that are on a lost card anew, onto the first of these cards."""
    for engine in service.engines[1:]:
        if lost in (card.name for card in engine.cards):
            free(engine)
            gc.collect()
            service.models.replace(engine, qengine.load(engine.opened, cards[0].twin()))
