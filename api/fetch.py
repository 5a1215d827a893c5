"""Pictures of the web, fetched for clients where --allow-image-urls says so.

Whoever may name an address could otherwise have this server ask its own network for them (server-side request forgery).
So nothing but public addresses is asked: the name in a URL is resolved once, all of its addresses are checked, and the
connection goes to one of these addresses, not to the name, which may mean another address a moment later (DNS
rebinding). A redirect is checked in the same way. Proxies that the environment names are not used. A file may have
MAX_BYTES, and the files of a request may take SECONDS, with their names and redirects.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import urllib.parse

from engine.request import RequestError

SECONDS = 10                # for all files of a request together
MAX_BYTES = 32 << 20        # of a file
MAX_REDIRECTS = 3
PIECE = 1 << 16             # bytes that are read at once
HEADERS = {"User-Agent": "qengine", "Accept": "image/*"}
SAFE = "/?%:@!$&'()*+,;=~"  # letters of a path that mean something
IPV6 = ipaddress.ip_network("2000::/3")             # what of IPv6 is public at all
TUNNELS = [ipaddress.ip_network(one) for one in ("2001::/32", "2002::/16")]     # they hold IPv4 addresses: Teredo, 6to4


class Unreachable(Exception):
    """A file cannot be fetched. The text says why, as in "it answers with status 404"."""


class Fetcher:
    """Fetches files. resolve, connect: as `socket` has them; tests have their own."""

    def __init__(self, resolve=socket.getaddrinfo, connect=socket.create_connection):
        self.resolve, self.connect = resolve, connect

    def __call__(self, url: str, field: str, seconds: float) -> bytes:
        """The file at an address. seconds: that are left of SECONDS. Raises RequestError, which names the field."""
        job = Job(self, url)
        threading.Thread(target=job.run, name="picture of the web", daemon=True).start()
        if not job.is_over.wait(seconds):
            job.give_up()
            job.error = Unreachable(f"the files of a request may take {SECONDS} s together")
        if job.error is not None:
            raise RequestError(field, f"'{field}' cannot be fetched: {job.error}")
        return job.data


class Job:
    """One file on its way, on a thread of its own, since nothing ends a look for a name early."""

    def __init__(self, fetcher: Fetcher, url: str):
        self.fetcher, self.url = fetcher, url
        self.data = self.error = self.connection = None
        self.is_over, self.is_given_up = threading.Event(), False

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
        self.connection = Checked(parts.hostname, port, address, is_secure, self.fetcher.connect)
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
    has to be for."""

    def __init__(self, host: str, port: int, address: str, is_secure: bool, connect):
        super().__init__(host, port, timeout=SECONDS)
        self.address, self.is_secure, self.open_socket = address, is_secure, connect
        self.default_port = 443 if is_secure else 80        # the header Host leaves it out

    def connect(self):
        self.sock = self.open_socket((self.address, self.port), self.timeout)
        if self.is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host,
                                                                 do_handshake_on_connect=False)
            self.sock.do_handshake()        # here, where `Job.give_up` finds the socket


def checked(found: list) -> str:
    """One of the addresses that `getaddrinfo` has found, all of which must be public. Raises Unreachable."""
    addresses = [entry[4][0] for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise Unreachable("its address is not a public one")
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address belongs to a machine that everybody may ask."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:              # fe80::1%eth0
        return False
    if address.version == 6 and (address not in IPV6 or any(address in tunnel for tunnel in TUNNELS)):
        return False
    return address.is_global and not address.is_multicast
