"""The notebook of the tutorial; and the cells of the guide in a real kernel, which are interrupted."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

import psutil
import pytest

from support.programs.pages import File, steps

ROOT = Path(__file__).parents[2]
BLOCKS = {each.name: each.text for each in steps(ROOT / "docs/guides/notebooks.md") if isinstance(each, File)}
TUTORIAL = (ROOT / "examples/tutorial.ipynb").read_text()


class Notebook:
    """A kernel in an empty directory."""

    def __init__(self, directory):
        import jupyter_client

        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory), env=environment)
        self.connect()

    def connect(self):
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, cell, interrupt_when_it_says=None):
        """(what the cell prints on stdout, the name of the error that it ends with)."""
        said, error, heard = [], [], threading.Event()

        def hear(message):
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
                if interrupt_when_it_says and interrupt_when_it_says in "".join(said):
                    heard.set()
            elif message["msg_type"] == "error":
                error.append(content["ename"])

        def interrupt():  # in a thread, because this one is in the cell's loop
            if heard.wait(200):
                self.manager.interrupt_kernel()

        button = threading.Thread(target=interrupt)
        if interrupt_when_it_says:
            button.start()
        self.client.execute_interactive(cell, output_hook=hear, timeout=250)
        if interrupt_when_it_says:
            button.join()
        return "".join(said), *(error or [None])

    def prints_what_it_shows(self, *numbers):
        for number in numbers:
            assert self.run(BLOCKS[f"In [{number}]"]) == (BLOCKS.get(f"Out [{number}]", "Writing workers.py\n"), None)

    def children(self):
        kernel = psutil.Process(self.manager.provisioner.process.pid)
        server = [child for child in kernel.children() if "forkserver" in " ".join(child.cmdline())]
        return [worker for each in server for worker in each.children()]

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path):
    pytest.importorskip("ipykernel", reason="notebooks need ipykernel, which shmsync[guides] brings")
    opened = Notebook(tmp_path)
    yield opened
    opened.end()


def test_the_notebook_of_the_tutorial_has_its_programs_and_outputs():
    made = runpy.run_path(str(ROOT / "tools/notebook.py"))["notebook"]((ROOT / "docs/tutorial.md").read_text())
    assert made == TUTORIAL, "run python tools/notebook.py"


@pytest.mark.slow
def test_the_cells_print_what_the_page_shows_also_after_an_interrupt_and_a_second_run(notebook):
    notebook.prints_what_it_shows(1, 2, 3)
    _, error = notebook.run(BLOCKS["In [4]"], interrupt_when_it_says="training")
    assert error == "KeyboardInterrupt"
    notebook.prints_what_it_shows(5)
    first = notebook.children()
    assert len(first) == 2
    notebook.prints_what_it_shows(2, 3)  # the cell is run again
    second = notebook.children()
    assert len(second) == 2 and not {each.pid for each in first} & {each.pid for each in second}
