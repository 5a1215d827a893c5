"""The sockets under the Flask app: waitress' loop and threads, with room for everybody who has something to say.

Where more clients are connected than there is room for, those go that have been unfinished or idle for longest. So
neither idle clients nor those that send a byte now and then keep a whole request out. Where all are busy, the next
client waits until one is not.
"""

import contextlib
import errno
import heapq
import logging
import resource
import select
import socket
import ssl
import threading
import time

import flask
import waitress.adjustments
import waitress.server
import waitress.task
import waitress.wasyncore

from .connection import Connection, in_one_line
from .errors import MAX_BODY
from .heads import MAX_HEAD
from .service import Service
from .tls import RECORD

CONNECTIONS = 1000          # at the same time; more than threads, or streams wait for a connection
OTHER_FILES = 256           # that the process has open: the model, cards, caches
AT_ONCE = 64                # connections that are accepted before those that are open get their turn
SPARE = 3 * MAX_BODY        # bytes above the limit that a body may have, so that Flask refuses it as its protocol does
PAUSE_SECONDS = 1           # before the next try, where the machine has no room for a connection
POLL_MS = 1000              # between two looks at deadlines
LAST_SECONDS = 1.0          # at the end of a server, in which written bytes can leave
READ = select.POLLIN | select.POLLPRI
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def listen(host: str, port: int) -> list:
    """A listening socket for each address of `host`. Raises OSError where one address cannot be listened on; then none
    is."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(address[:2], family=family)) for family, _, _, _, address
                   in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
        opened.pop_all()        # from here on the caller closes them
    return sockets


def room_for_connections() -> int:
    """How many connections the process may have open. Raises its limit of open files as far as that is allowed; a
    large body is in a file as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(16, min(CONNECTIONS, (soft - OTHER_FILES) // 2))
    return CONNECTIONS


class Listener(waitress.server.TcpWSGIServer):
    """An address that clients connect to. service: of the app; tls: None where connections are not encrypted."""

    channel_class = Connection

    def __init__(self, service: Service, tls: ssl.SSLContext | None, *arguments, **options):
        self.service, self.tls = service, tls
        self.next_look = self.paused_until = 0
        self.has_room = True
        super().__init__(*arguments, **options)

    def tend(self):
        """What is to be done between two polls: deadlines every second, and room for whoever comes next."""
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + 1
            for connection in list(self.active_channels.values()):
                connection.keep_time()
        self.adj.max_request_body_size = self.service.max_body + SPARE      # the model may have been loaded meanwhile
        self.has_room = self.make_room(self.n_over()) > 0 and now >= self.paused_until

    def readable(self) -> bool:
        return self.accepting and self.has_room

    def n_over(self) -> int:
        """Connections above the limit; below zero: so many places are free."""
        return len(self._map) - self.adj.connection_limit

    def handle_accept(self):
        for _ in range(min(AT_ONCE, self.make_room(self.n_over()))):    # another listener may have let clients in
            try:
                accepted = self.accept()
            except OSError as error:
                if error.errno in NO_ROOM and self.make_room(1) < 0:
                    self.paused_until = time.monotonic() + PAUSE_SECONDS    # or the loop would try again at once
                return
            if accepted is None:
                return
            client, address = accepted
            try:
                self.set_socket_options(client)
                connection = self.channel_class(self, client, address, self.adj, map=self._map)
            except OSError:             # the client has left
                client.close()
                continue
            waitress.wasyncore.read(connection)     # or it might have to go before its request is seen

    def make_room(self, n: int) -> int:
        """Closes up to n connections that may go; n below zero: so many places are free. Returns how many more clients
        could be let in, with the places of others that may go; below zero: so many could not be closed."""
        if n <= -AT_ONCE:
            return -n               # enough, whoever may go
        idle = [connection for connection in connections(self._map) if connection.may_go()]
        for connection in heapq.nsmallest(n, idle, key=Connection.usefulness):
            connection.give_way()
        return len(idle) - n


def poll_all(watched: dict):
    """Waitress' loop, until nothing is left to watch: like wasyncore.loop, but what a poll says of a socket is never
    taken for news of another one that was accepted in the same round and got its number.

    watched: {number of a socket: Listener, Connection or trigger}.
    """
    while watched:
        for item in list(watched.values()):
            if isinstance(item, Listener):
                item.tend()
        polled, asked = select.poll(), watched.copy()
        for number, item in asked.items():
            flags = READ * bool(item.readable()) | select.POLLOUT * bool(item.writable())
            if flags:
                polled.register(number, flags)
        for number, news in polled.poll(POLL_MS):
            if watched.get(number) is asked[number]:
                waitress.wasyncore.readwrite(asked[number], news)


class OneLine(logging.Filter):
    """Keeps waitress' messages, which quote clients, short and in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = in_one_line(record.getMessage()), ()
        return True


@contextlib.contextmanager
def serving(app: flask.Flask, host: str, port: int, tls: ssl.SSLContext | None = None):
    """Answers HTTP on other threads while the `with` body runs, or HTTPS where there is a `tls`; gives the port.
    Raises OSError: it cannot listen."""
    service = app.extensions["qengine"]
    try:
        sockets = listen(host, port)        # here, because waitress' threads start before it listens
    except OSError:
        service.close()
        raise
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)     # waitress would warn of every request that waits
    one_line = OneLine()
    logging.getLogger("waitress").addFilter(one_line)
    settings = waitress.adjustments.Adjustments(
        sockets=sockets, ident="qengine", url_scheme="https" if tls else "http",
        threads=service.max_requests + 8,       # an open request holds a thread; 8 are left for /health and the like
        connection_limit=room_for_connections(), backlog=4096,
        channel_request_lookahead=1,            # or waitress does not notice that a client hung up
        recv_bytes=RECORD, log_socket_errors=False,
        inbuf_overflow=4 * RECORD,              # bytes of a body in memory; a longer one is in a file
        outbuf_high_watermark=100_000,          # bytes that an answer may be ahead of its reader
        max_request_header_size=MAX_HEAD,
        max_request_body_size=MAX_BODY + SPARE)     # see Listener.tend
    watched = {}                                # what waitress polls, by the number of the socket
    workers = waitress.task.ThreadedTaskDispatcher()
    workers.set_thread_count(settings.threads)
    listeners = [Listener(service, tls, app, watched, _sock=one, dispatcher=workers, adj=settings, bind_socket=False,
                          sockinfo=(one.family, one.type, one.proto, one.getsockname())) for one in sockets]
    is_told = threading.Event()

    def leave():
        """Closes the sockets of listeners and of clients to whom nothing is left to send, in the polling thread: it
        would not notice before its next look that another thread closes them. A request that has just come gets no
        answer, for no thread is left that could write one. This closes the trigger, too, which something else may have
        pulled before. So it waits until nobody pulls the trigger any more."""
        is_told.wait()
        for listener in listeners:
            listener.close()
        for one in connections(watched):
            one.leave()

    thread = threading.Thread(target=poll_all, args=(watched,), name="http server", daemon=True)
    thread.start()
    try:
        yield listeners[0].effective_port if len(listeners) == 1 else port
    finally:
        if not service.close():                 # a client does not read its answer
            hang_up(connections(watched))
        workers.shutdown()                      # waits for the threads that write the last answers
        listeners[0].trigger.pull_trigger(leave)
        is_told.set()
        thread.join(LAST_SECONDS)
        hang_up(connections(watched))           # on clients that do not read
        thread.join()
        logging.getLogger("waitress").removeFilter(one_line)


def connections(watched: dict) -> list[Connection]:
    """The clients among what is polled."""
    return [item for item in list(watched.values()) if isinstance(item, Connection)]


def hang_up(clients):
    for connection in clients:
        connection.hang_up()
