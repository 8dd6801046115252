"""A real browser for tests: Chromium without a window, driven over its DevTools protocol through two pipes."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def executable():
    """The browser's path. Fails, rather than skips, where there is none: these tests are the proof that a report opens."""
    named = os.environ.get("FLDIAG_BROWSER")
    found = shutil.which(named) if named else next((p for p in map(shutil.which, NAMES) if p), None)
    assert found, (
        f"FLDIAG_BROWSER={named} is not an executable"
        if named
        else f"none of {', '.join(NAMES)} is on PATH: install one (Debian: apt-get install chromium), or name one in "
        "FLDIAG_BROWSER, or leave these tests out with -m 'not browser'"
    )
    return found


def _moved(fd):
    new = fcntl.fcntl(fd, fcntl.F_DUPFD, 20)
    os.close(fd)
    return new


class Browser:
    """One page. ``errors``: everything the page complained of; ``requests``: every address outside itself that it asked
    for."""

    def __init__(self, width=1280, height=900, dark=False, mobile=False, flags=(), before=""):
        self.folder = tempfile.mkdtemp(prefix="browser-")
        read, self.output = os.pipe()
        self.input, write = os.pipe()
        # the browser reads from its 3 and writes to its 4, so the ends that it inherits must not be these
        read, write = (_moved(fd) for fd in (read, write))
        argv = [executable(), *FLAGS, *flags, f"--user-data-dir={self.folder}", "about:blank"]
        self.pid = os.posix_spawn(
            argv[0],
            argv,
            os.environ,
            setpgroup=0,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, read, 3),
                (os.POSIX_SPAWN_DUP2, write, 4),
            ],
        )
        os.close(read), os.close(write)
        self.buffer, self.count, self.session = b"", 0, None
        self.errors, self.requests, self.downloads = [], [], {}
        target = next(
            t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self.session = self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        if mobile:
            self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        if before:  # JavaScript that runs before that of the page
            self.send("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.dark(dark)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.output)
        os.close(self.input)
        end = time.monotonic() + 10  # it leaves by itself when the pipes close
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- protocol

    def send(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        return self._until(lambda m: m.get("id") == self.count, method)

    def _until(self, wanted, what, seconds=60):
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self.buffer:
                line, self.buffer = self.buffer.split(b"\0", 1)
                message = json.loads(line)
                self._note(message)
                if wanted(message):
                    assert "error" not in message, (what, message["error"])
                    return message.get("result", {})
            assert time.monotonic() < end, f"the browser did not answer {what} within {seconds} s"
            if select.select([self.input], [], [], 1)[0]:
                more = os.read(self.input, 1 << 20)
                assert more, f"the browser ended during {what}"
                self.buffer += more

    def _note(self, message):
        name, about = message.get("method"), message.get("params", {})
        if name == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif name == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(
                " ".join(str(a.get("value", a.get("description"))) for a in about["args"])
            )
        elif name == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif name == "Page.javascriptDialogOpening":
            self.errors.append(f"the page opened a dialog: {about['message']}")
        elif name == "Network.requestWillBeSent" and not about["request"]["url"].startswith(
            ("data:", "blob:")
        ):
            self.requests.append(about["request"]["url"])
        elif name == "Browser.downloadProgress" and about["state"] == "completed":
            self.downloads[about["guid"]] = (
                Path(self.folder) / "saved" / self.downloads[about["guid"]]
            )
        elif name == "Browser.downloadWillBegin":
            self.downloads[about["guid"]] = about["suggestedFilename"]

    # -- what tests do

    def open(self, path, ready="document.documentElement?.dataset.ready"):
        """Open a file; returns when its figures are drawn: when ``ready`` is "yes"."""
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        assert self.wait(ready) == "yes", (
            self.run("document.body.innerText"),
            self.errors,
        )
        return self

    def run(self, code):
        """The value of a JavaScript expression, awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, code, seconds=60):
        """The value of the expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < end, f"still {value!r} after {seconds} s: {code}"
            time.sleep(0.05)
        return value

    def dark(self, on):
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}],
        )

    def key(self, name, code):
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def drag(self, start, end, steps=8):
        """Press at a place, move in steps, release."""
        (x, y), (u, v) = start, end
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.send(
            "Input.dispatchMouseEvent",
            type="mousePressed",
            x=x,
            y=y,
            button="left",
            buttons=1,
            clickCount=1,
        )
        for i in range(1, steps + 1):
            self.send(
                "Input.dispatchMouseEvent",
                type="mouseMoved",
                x=x + (u - x) * i / steps,
                y=y + (v - y) * i / steps,
                button="left",
                buttons=1,
            )
        self.send(
            "Input.dispatchMouseEvent",
            type="mouseReleased",
            x=u,
            y=v,
            button="left",
            buttons=0,
            clickCount=1,
        )

    def download(self, click):
        """The file that a click (JavaScript) saves: (name, content)."""
        folder = Path(self.folder) / "saved"
        folder.mkdir(exist_ok=True)
        self.send(
            "Browser.setDownloadBehavior",
            behavior="allow",
            downloadPath=str(folder),
            eventsEnabled=True,
        )
        before = set(self.downloads)
        self.run(click + "; 0")
        end = time.monotonic() + 30
        while not (
            done := [
                p for g, p in self.downloads.items() if g not in before and isinstance(p, Path)
            ]
        ):
            assert time.monotonic() < end, "nothing was saved"
            self.run("0")
            time.sleep(0.05)
        return done[0].name, done[0].read_bytes()

    def screenshot(self, path, whole=True):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def pdf(self):
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])
