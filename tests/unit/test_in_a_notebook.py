"""In a notebook's kernel: tables and figures show themselves, and what takes long has a bar."""

import pytest

pytestmark = pytest.mark.slow
CELLS = (
    "import fldiag, torch\n"
    "torch.manual_seed(0)\n"
    "net, x = torch.nn.Linear(4, 3), torch.randn(30, 4)\n"
    "problem = fldiag.Problem(net, torch.nn.functional.cross_entropy, (x, torch.arange(30) % 3))\n"
    "problem",
    "table = fldiag.diagnose(problem, 'profile', directions='random', points=5)\ntable",
    "fldiag.draw(table)",
    "import tempfile\n"
    "config = fldiag.Config.load('digits', rounds=2, model__name='mlp', clients__per_round=2, train__epochs=1)\n"
    "run = fldiag.train(config, out=tempfile.mkdtemp() + '/run')",
)


def updates(client):
    """Records what the displays of a notebook are updated to, in order."""
    texts, process = [], client.process_message

    def listen(message, *rest):
        if message["msg_type"] == "update_display_data":
            texts.append(message["content"]["data"]["text/html"])
        return process(message, *rest)

    client.process_message = listen
    return texts


def test_what_cells_show():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3")
    bars = updates(client)
    client.execute()
    problem, table, figure, training = (cell.outputs for cell in book.cells)
    assert "<table>" in problem[-1].data["text/html"]
    assert any("loss" in output.data.get("text/html", "") for output in table if "data" in output)
    assert figure[-1].data["image/png"] and not [o for o in figure if o.output_type == "error"]
    assert any("<progress" in text and "fedavg: round" in text for text in bars)
    assert [o.data["text/html"] for o in training] == [
        ""
    ]  # the bar is gone, and nothing else was printed
