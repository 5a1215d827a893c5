"""A server on the command line: it listens, loads, serves, and may go on when a card fails."""

import contextlib
import gc
import signal
import sys
import time

import qengine
from api.access import is_loopback, read_keys
from api.http import serving
from api.log import on_stderr
from api.service import MAX_WAITING, Service, create_app
from engine.request import Fault, ModelError, RequestError
from kernels.card import CardError
from kernels.compile import CompileError

from .engines import asked, load_engine, traced


def run_server(options, sampling: dict, thinking) -> int:
    """Listens, loads, and serves until Ctrl-C or SIGTERM; then cancels open requests and tells their clients."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keys = read_keys(options.api_key, options.api_key_file)
    app = create_app(sampling=sampling, thinking=thinking, max_requests=options.slots + MAX_WAITING, keys=keys,
                     origins=options.cors, host=options.host, log_prompts=options.log_prompts)
    service = app.extensions["qengine"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_stderr(service.log))
        try:
            port = stack.enter_context(serving(app, options.host, options.serve))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            qengine.note(f"qengine: cannot listen on {options.host} port {options.serve}: {reason}")
            return 2
        if not keys and not is_loopback(options.host):
            qengine.note(f"warning: whoever reaches {options.host} can use this server: --api-key asks for a key")
        service.engine = load_engine(options.model, options)
        stack.enter_context(traced(service.engine, options))
        try:
            qengine.note(f"serving {service.engine.name} on http://{options.host}:{port}/ (a page to talk with it, and "
                         "/v1 for programs; Ctrl-C stops)")
            is_working = True
            while is_working:
                service.engine.scheduler.thread.join()  # ends by a failure only; /health goes on to tell of it
                qengine.note(f"qengine: {service.engine.reason}")
                is_working = options.go_on and go_on(service, options)
            while True:
                time.sleep(3600)
        finally:
            stack.close()
            service.engine.close()


def go_on(service: Service, options) -> bool:
    """Gives the service, whose engine has failed, another engine on the cards that are left: all cards that were
    opened, without those that have failed, also while the new engine is loaded. Returns whether there is one."""
    failed, fault = service.engine, service.engine.fault
    left = failed.cards + failed.spare
    service.is_loading = True
    failed.close()
    for stage in failed.pipeline.stages:
        stage.release()
    try:
        while fault.card is not None:
            service.lost.append(fault)
            left = [card for card in left if card.name != fault.card]
            if not left:
                raise CardError("no card is left")
            gc.collect()                # tracebacks still hold memory of the failed engine
            try:
                service.engine = qengine.load(options.model, left, **asked(options) | {"split": None})
            except CardError as error:
                if error.card is None:
                    raise
                qengine.note(f"qengine: {error}")
                fault = Fault.of(error)
            else:
                qengine.note(f"going on with {', '.join(card.name for card in service.engine.cards)}")
                return True
        raise CardError("no card is known to be at fault")
    except (CardError, CompileError, ModelError, RequestError) as error:
        qengine.note(f"qengine: cannot go on: {error}")
        return False
    finally:
        service.is_loading = False
