"""Pictures of the web, fetched for clients where --allow-image-urls says so.

Whoever may name an address could otherwise have this server ask its own network for them (server-side request forgery).
So nothing but public addresses is asked: the name in a URL is resolved once, all of its addresses are checked, and the
connection goes to one of these addresses, not to the name, which may mean another address a moment later (DNS
rebinding). A redirect is checked in the same way. Proxies that the environment names are not used. A file may have
MAX_BYTES, and the files of a request may take SECONDS, with their names and redirects. AT_ONCE files are fetched or
held at the same time, for all requests together.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse

from werkzeug.exceptions import TooManyRequests

from engine.patience import ENDLESS, Patience
from engine.request import DeadlineExceeded, RequestError

SECONDS = 10                # for all files of a request together
AT_ONCE = 16                # threads, and files in memory: half a gigabyte of them at most
MAX_BYTES = 32 << 20        # of a file
MAX_REDIRECTS = 3
PIECE = 1 << 16             # bytes that are read at once
HEADERS = {"User-Agent": "qengine", "Accept": "image/*"}
SAFE = "/?%:@!$&'()*+,;=~"  # letters of a path that mean something
PRIVATE = "its address is not a public one"

# What is never asked: the blocks of IANA's registries of special-purpose addresses (iana.org/assignments,
# iana-ipv4-special-registry and iana-ipv6-special-registry) and of multicast. Those that can be reached from everywhere
# are among them: they are relays and sinks, which hold nobody's pictures. Of IPv6 only 2000::/3 is public at all
# (ipv6-address-space). So 6to4 and Teredo are the only forms of IPv4 addresses that need a line: IPv4-mapped ones
# (::ffff:0:0/96) and NAT64 (64:ff9b::/96, 64:ff9b:1::/48) lie outside, as does Amazon's metadata (fd00:ec2::254).
# Azure has its metadata at a public address (learn.microsoft.com/azure/virtual-network, "What is IP address
# 168.63.129.16?"). Other clouds use addresses of these blocks: 169.254.169.254, 100.100.100.200, 192.0.0.192.
NOT_PUBLIC = [ipaddress.ip_network(block) for block in (
    "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16",                                       # this machine, this link
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10",                   # private, of providers
    "192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24",            # protocols, AS112, AMT
    "192.88.99.0/24",                                                                   # relays of 6to4
    "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15",               # documentation, benchmarks
    "224.0.0.0/4", "240.0.0.0/4",                                                       # multicast, reserved
    "168.63.129.16/32",                                                                 # Azure
    "2001::/23", "2002::/16", "2620:4f:8000::/48",                                      # Teredo and others, 6to4, AS112
    "2001:db8::/32", "3fff::/20")]                                                      # documentation
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


class Unreachable(Exception):
    """A file cannot be fetched. The text says why, as in "it answers with status 404"."""


class Fetcher:
    """Fetches files. resolve, connect: as `socket` has them; tests have their own."""

    def __init__(self, resolve=socket.getaddrinfo, connect=None):
        self.resolve, self.connect = resolve, connect or connect_outside
        self.places = threading.Semaphore(AT_ONCE)

    @contextlib.contextmanager
    def __call__(self, url: str, field: str, seconds: float, patience: Patience = ENDLESS):
        """Gives the file at an address, which keeps one of AT_ONCE places while the `with` body runs. seconds: that are
        left of SECONDS. Raises RequestError, which names the field; DeadlineExceeded where the patience ends;
        TooManyRequests where no place gets free."""
        end = time.monotonic() + seconds
        if not patience.wait(lambda left: self.places.acquire(timeout=left), seconds):
            if not patience.left:
                raise DeadlineExceeded(patience.why)
            raise TooManyRequests(f"too many pictures of the web: {AT_ONCE} are being fetched already", retry_after=1)
        job = Job(self, url)
        try:
            job.start()
            if not patience.wait(job.is_over.wait, max(0.0, end - time.monotonic())):
                job.give_up()
                if not patience.left:
                    raise DeadlineExceeded(patience.why)
                job.error = Unreachable(f"the files of a request may take {SECONDS} s together")
            if job.error is not None:
                raise RequestError(field, f"'{field}' cannot be fetched: {job.error}")
            yield job.data
        finally:
            job.is_done_with.set()


class Job:
    """One file on its way, on a thread of its own, since nothing ends a look for a name early. The thread frees the
    job's place when it has ended and the file is done with: many that hang take no more than AT_ONCE threads."""

    def __init__(self, fetcher: Fetcher, url: str):
        self.fetcher, self.url = fetcher, url
        self.data = self.error = self.connection = None
        self.is_over, self.is_done_with, self.is_given_up = threading.Event(), threading.Event(), False

    def start(self):
        try:
            threading.Thread(target=self.run, name="picture of the web", daemon=True).start()
        except RuntimeError:            # the machine has no more threads
            self.fetcher.places.release()
            raise

    def run(self):
        try:
            self.data = self.follow(self.url)
        except Unreachable as error:
            self.error = error
        except (OSError, http.client.HTTPException) as error:
            self.error = Unreachable(f"its server cannot be reached ({type(error).__name__})")
        except Exception as error:
            self.error = Unreachable(f"its address cannot be read ({type(error).__name__})")
        finally:
            self.is_over.set()
            self.is_done_with.wait()
            self.fetcher.places.release()

    def give_up(self):
        """Ends the job soon: what waits for the other server then fails. The thread that waits for the job calls it."""
        self.is_given_up, connection = True, self.connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def follow(self, url: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            found, url = self.ask(url)
            if url is None:
                return found
        raise Unreachable(f"it redirects more than {MAX_REDIRECTS} times")

    def ask(self, url: str) -> tuple[bytes | None, str | None]:
        """The file at an address, or where it has gone to."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise Unreachable("its address is not of the form https://host/path")
        is_secure = parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        address = checked(self.fetcher.resolve(parts.hostname, port, type=socket.SOCK_STREAM))
        self.check_patience()
        self.connection = Checked(parts.hostname, port, address, is_secure, self.fetcher.connect, self.check_patience)
        try:
            target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
            self.connection.request("GET", urllib.parse.quote(target, safe=SAFE), headers=HEADERS)
            response = self.connection.getresponse()
            if response.status in (301, 302, 303, 307, 308) and (place := response.headers.get("Location")):
                return None, urllib.parse.urljoin(url, place)
            if response.status != 200:
                raise Unreachable(f"it answers with status {response.status}")
            return self.read(response), None
        finally:
            self.connection.close()

    def check_patience(self):
        """Ends a job that nobody waits for any more."""
        if self.is_given_up:
            raise Unreachable("nobody waits for it")

    def read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, n_bytes = [], 0
        while piece := response.read1(PIECE):
            self.check_patience()
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > MAX_BYTES:
                raise Unreachable(f"it has more than {MAX_BYTES} bytes")
        if response.length:                 # bytes that the head has promised and that never came
            raise Unreachable("it breaks off")
        return b"".join(pieces)


class Checked(http.client.HTTPConnection):
    """A connection to an address that was checked. host: the name that the address was found by, which a certificate
    has to be for. check: raises once the job was given up. It is called for each new socket, since `Job.give_up` may
    have come just before there was one to end."""

    def __init__(self, host: str, port: int, address: str, is_secure: bool, connect, check):
        super().__init__(host, port, timeout=SECONDS)
        self.address, self.is_secure, self.open_socket, self.check = address, is_secure, connect, check
        self.default_port = 443 if is_secure else 80        # the header Host leaves it out

    def connect(self):
        self.sock = self.open_socket((self.address, self.port), self.timeout)
        self.check()
        if self.is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host,
                                                                 do_handshake_on_connect=False)
            self.check()
            self.sock.do_handshake()        # here, where `Job.give_up` finds the socket


def connect_outside(address: tuple[str, int], timeout: float) -> socket.socket:
    """A socket that is connected to another machine. Raises Unreachable for this machine: a public address of its own
    leads to what no firewall keeps from it."""
    connection = socket.create_connection(address, timeout)
    if connection.getpeername()[0] == connection.getsockname()[0]:
        connection.close()
        raise Unreachable(PRIVATE)
    return connection


def checked(found: list) -> str:
    """One of the addresses that `getaddrinfo` has found, all of which must be public. Raises Unreachable."""
    addresses = [entry[4][0] for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise Unreachable(PRIVATE)
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address belongs to a machine that everybody may ask."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:              # fe80::1%eth0
        return False
    if address.version == 6 and address not in PUBLIC_IPV6:
        return False
    return not any(address in block for block in NOT_PUBLIC)
