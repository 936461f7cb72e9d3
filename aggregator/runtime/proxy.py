"""nginx between the network and Flower's server: it lets silos' requests pass and nothing else.

On one port Flower serves silos (`/v1/fleet/`), people who submit code (`/v1/control/`) and its own programs
(`/v1/runtime/`). So Flower's server listens on loopback, and nginx on the federation's address passes on a POST whose
target, byte for byte as it was sent, is `/v1/fleet/` and one word. Both speak TLS with the federation's certificate.
What else arrives is answered with 403 and logged without what it carried.
"""

import ipaddress
import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import MissingFileError, SetupError
from ddm.io.files import write_atomic

_CONFIG = "nginx.conf"
# Debian installs nginx into sbin, which is not in the PATH of ordinary users.
_SEARCH = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin")
_TEST_TIMEOUT_S = 20.0
_TEMPLATE = """\
# Written by `aggregator run` at every start; changes are lost. Paths are relative to this folder.
daemon off;
pid nginx/nginx.pid;
worker_processes 2;
worker_rlimit_nofile 8192;
# Less severe lines (error, warn, info) would quote what strangers sent.
error_log stderr crit;

events {{
    worker_connections 4000;
}}

http {{
    server_tokens off;
    client_body_temp_path nginx/body;
    proxy_temp_path nginx/proxy;
    fastcgi_temp_path nginx/fastcgi;
    uwsgi_temp_path nginx/uwsgi;
    scgi_temp_path nginx/scgi;

    # $request_uri is the target as sent: what a later reader might decode or tidy does not match.
    map "$request_method $request_uri" $is_fleet {{
        default 0;
        "~^POST /v1/fleet/[a-z-]{{1,40}}$" 1;
    }}

    # Only what was not served, and of its target only the beginning of the path.
    map $request_uri $path_start {{
        default -;
        "~^(?<start>/[A-Za-z0-9/_.-]{{0,60}})" $start;
    }}
    map $status $is_refused {{
        default 1;
        ~^2 0;
    }}
    log_format refusals "$time_iso8601 $remote_addr $status $path_start $request_length bytes $request_time s";
    access_log /dev/stdout refusals if=$is_refused;

    limit_conn_zone $binary_remote_addr zone=addresses:1m;
    limit_conn_status 429;

    upstream superlink {{
        server 127.0.0.1:{upstream_port};
        # Flower's server closes an idle connection after 5 s.
        keepalive 32;
        keepalive_timeout 3s;
    }}

    server {{
        listen {listen} ssl;
        ssl_certificate ../tls/server.pem;
        ssl_certificate_key ../tls/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;

        limit_conn addresses {limits.requests};
        client_max_body_size {limits.body_bytes};
        client_header_buffer_size 4k;
        large_client_header_buffers 4 8k;
        client_header_timeout {limits.header_s}s;
        client_body_timeout {limits.body_s}s;
        send_timeout 60s;
        keepalive_timeout 60s;
        lingering_time 5s;
        reset_timedout_connection on;

        # `aggregator run` asks this every few seconds.
        location = /health {{
            access_log off;
            return 403;
        }}

        proxy_http_version 1.1;
        proxy_request_buffering off;
        proxy_buffering off;
        proxy_connect_timeout 5s;
        proxy_read_timeout 120s;
        proxy_next_upstream off;
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate ../tls/ca.pem;
        proxy_ssl_name localhost;
        proxy_ssl_protocols TLSv1.2 TLSv1.3;
        proxy_set_header Host localhost;
        proxy_set_header Connection "";
        proxy_set_header Upgrade "";
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Forwarded-Proto https;

        # The only request with a large body.
        location = /v1/fleet/push-object {{
            if ($is_fleet = 0) {{
                return 403;
            }}
            client_max_body_size {limits.object_bytes};
            proxy_pass https://superlink;
        }}

        location / {{
            if ($is_fleet = 0) {{
                return 403;
            }}
            proxy_pass https://superlink;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Limits:
    """The resources that one stranger may use.

    Attributes:
        object_bytes: of one request with an object. Flower sends arrays as objects of 5 MiB, whatever the size of a
            message, and its server reads a body before it asks whose it is.
        body_bytes: of any other request. Flower also parses a body before it asks whose it is: 8 MiB of empty parts
            take 200 MiB then.
        requests: at a time from one address. A courier makes a few, and several silos may share an address.
        header_s: seconds until TLS is agreed, and again until a request's header is there.
        body_s: seconds between two pieces of a request's body.
    """

    object_bytes: int = 8 * 1024 * 1024
    body_bytes: int = 64 * 1024
    requests: int = 64
    header_s: int = 15
    body_s: int = 20


def render_config(host: str, port: int, upstream_port: int, limits: Limits = Limits()) -> str:
    """Return the text of nginx.conf.

    Args:
        host: a name or an address of this machine to listen on.
        port: the public port.
        upstream_port: where Flower's server listens on 127.0.0.1.
        limits: the resources that a stranger may use.

    Raises:
        SetupError: the host could be read as more than a host.
    """
    # The host is written into the configuration as it is, where a semicolon would begin another setting.
    is_plain = host.isascii() and all(sign.isalnum() or sign in ".:-" for sign in host)
    if not host or not is_plain:
        raise SetupError("host", expected="a name or an address", got=repr(host[:100]))
    # An IPv6 address is written in brackets.
    address = f"[{host}]" if ":" in host else host
    return _TEMPLATE.format(
        listen=f"{address}:{port}",
        upstream_port=upstream_port,
        limits=limits,
    )


def find_nginx() -> Path | None:
    """Find nginx, also where only administrators look."""
    path = shutil.which("nginx") or shutil.which("nginx", path=":".join(_SEARCH))
    return Path(path) if path else None


def choose_proxy(host: str) -> Path | None:
    """Return the nginx that takes the federation's address; None where Flower's own server may, on loopback alone.

    Raises:
        MissingFileError: others can reach the address, and nginx is not installed.
    """
    nginx = find_nginx()
    if nginx is None and not is_loopback(host):
        raise MissingFileError(
            "nginx",
            expected=f"nginx in front of {host}, which other machines reach",
            got="no nginx; without it, anybody who reaches the port can run code here",
            remedy="Install nginx 1.19.5 or later (Debian: apt install nginx-light), or set a loopback host.",
        )
    return nginx


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than `localhost` may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def nginx_command(nginx: Path, flower: Path) -> list[str]:
    """Return the command that runs nginx in the foreground; `flower` is the folder of nginx.conf."""
    # Without -e, which is new in 1.19.5, nginx first opens the log that it was built with, which only root may write.
    return [str(nginx), "-e", "stderr", "-p", f"{flower}/", "-c", str(flower / _CONFIG)]


def write_config(nginx: Path, flower: Path, text: str) -> None:
    """Write nginx.conf into `flower`, `tls/` beside it, and let nginx check it, and whether it may take the port.

    Raises:
        SetupError: nginx refuses it.
    """
    (flower / "nginx").mkdir(parents=True, exist_ok=True)
    write_atomic(flower / _CONFIG, text.encode())
    try:
        test = subprocess.run(
            [*nginx_command(nginx, flower), "-t", "-q"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TEST_TIMEOUT_S,
            check=False,
        )
    # nginx looks up a host's name while it tests, and a name server may never answer.
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            "nginx -t", expected=f"an answer within {_TEST_TIMEOUT_S:.0f} s", got="no answer"
        ) from error
    if test.returncode:
        lines = test.stderr.splitlines()
        # Warnings may come first; the line of the error has this mark.
        errors = [line for line in lines if "[emerg]" in line] or lines
        raise SetupError(
            "nginx -t",
            expected="a configuration that nginx accepts",
            got=errors[0][:300] if errors else f"exit code {test.returncode}",
            remedy="Correct what nginx reports: a port below 1024 needs a privilege, and an old nginx must be updated.",
        )


def address_to_connect(host: str) -> str:
    """Return where a server that listens on this host is reached from this machine."""
    # An address that means all of this machine's cannot be connected to; loopback is one of them.
    loopback_of_all = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return loopback_of_all.get(host, host)


def answers(host: str, port: int, ca_path: Path, *, timeout_s: float = 5.0) -> bool:
    """Whether a server there, certified by `ca_path`, answers HTTP; what it answers does not matter."""
    context = ssl.create_default_context(cafile=str(ca_path))
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_s) as plain,
            # The certificate names localhost whatever the federation's address is, which may be one of many interfaces.
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False
