"""In a notebook's kernel: tables show themselves, and figures by matplotlib's own means."""

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.slow
CELLS = (
    "%matplotlib inline\n"
    "import fldiag, torch\n"
    "torch.manual_seed(0)\n"
    "net, x = torch.nn.Linear(4, 3), torch.randn(30, 4)\n"
    "problem = fldiag.Problem(net, torch.nn.functional.cross_entropy, (x, torch.arange(30) % 3))\n"
    "problem",
    "table = fldiag.diagnose(problem, 'paths', directions='random', points=5)\ntable",
    "fldiag.draw(table)",
    "import tempfile\n"
    "config = fldiag.Config.load('digits', rounds=2, model__name='mlp', clients__per_round=2, train__epochs=1)\n"
    "run = fldiag.train(config, out=tempfile.mkdtemp() + '/run')",
)


def test_what_cells_show():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3")
    client.execute()
    _, table, figure, training = (cell.outputs for cell in book.cells)
    assert any("loss" in output.data.get("text/html", "") for output in table if "data" in output)
    assert figure[-1].data["image/png"]
    assert not [o for out in (table, figure, training) for o in out if o.output_type == "error"]
