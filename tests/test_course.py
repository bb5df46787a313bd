"""The course's API: names, signatures, and behaviour that its homeworks rely on, in both of its backends."""

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import nn, ops
from needle.errors import ShapeError

ROOT = Path(__file__).parent.parent
NAMES = {
    "needle": "Tensor TensorTuple cpu all_devices init ones zeros zeros_like ones_like ops autograd data nn optim backend_selection "
    "backend_ndarray backend_numpy NDArray",
    "needle.backend_selection": "BACKEND array_api NDArray Device all_devices cpu default_device",
    "needle.autograd": "Op TensorOp TensorTupleOp Value Tensor TensorTuple NDArray array_api LAZY_MODE TENSOR_COUNTER "
    "compute_gradient_of_variables find_topo_sort topo_sort_dfs sum_node_list",
    "needle.ops": "EWiseAdd AddScalar EWiseMul MulScalar EWiseDiv DivScalar EWisePow PowerScalar MatMul Summation BroadcastTo Reshape "
    "Transpose Negate Log Exp ReLU Tanh LogSumExp LogSoftmax Stack Split Flip Dilate UnDilate Conv MakeTensorTuple TupleGetItem "
    "FusedAddScalars add add_scalar multiply mul_scalar divide divide_scalar power power_scalar matmul summation broadcast_to reshape "
    "transpose negate log exp relu tanh logsumexp logsoftmax stack split flip dilate undilate conv make_tuple tuple_get_item "
    "fused_add_scalars NDArray",
    "needle.init": "rand randn constant ones zeros randb one_hot zeros_like ones_like xavier_uniform xavier_normal kaiming_uniform "
    "kaiming_normal",
    "needle.nn": "Parameter Module Identity Linear Flatten ReLU Sequential SoftmaxLoss BatchNorm1d BatchNorm2d LayerNorm1d Dropout "
    "Residual Conv Sigmoid RNNCell RNN LSTMCell LSTM Embedding MultiHeadAttention AttentionLayer TransformerLayer Transformer "
    "_unpack_params _child_modules",
    "needle.optim": "Optimizer SGD Adam",
    "needle.data": "Dataset DataLoader NDArrayDataset MNISTDataset CIFAR10Dataset Dictionary Corpus batchify get_batch "
    "RandomFlipHorizontal RandomCrop Transform",
    "needle.backend_ndarray": "NDArray BackendDevice cpu cuda cpu_numpy default_device all_devices array empty full broadcast_to reshape "
    "maximum log exp tanh sum flip prod",
    "needle.backend_ndarray.ndarray": "NDArray BackendDevice array empty full",
    "needle.backend_ndarray.ndarray_backend_numpy": "Array to_numpy from_numpy __device_name__",
    "needle.backend_ndarray.ndarray_backend_cpu": "Array to_numpy from_numpy __device_name__ __tile_size__",
    "needle.backend_numpy": "Device CPUDevice cpu default_device all_devices",
    "needle.ops.ops_mathematic": "EWiseAdd matmul",
    "needle.ops.ops_logarithmic": "LogSumExp LogSoftmax",
    "needle.ops.ops_tuple": "MakeTensorTuple",
    "needle.init.init_basic": "rand randb one_hot",
    "needle.init.init_initializers": "xavier_uniform",
    "needle.nn.nn_basic": "Linear",
    "needle.nn.nn_conv": "Conv",
    "needle.nn.nn_sequence": "LSTM Embedding",
    "needle.nn.nn_transformer": "Transformer",
    "needle.data.data_basic": "Dataset DataLoader",
    "needle.data.data_transforms": "RandomCrop",
    "needle.data.datasets": "MNISTDataset NDArrayDataset CIFAR10Dataset Corpus",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    found = __import__(module, fromlist=["x"])
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_the_package_gives_its_devices_and_ops():
    assert ndl.cpu is ndl.backend_selection.cpu and ndl.cuda is ndl.backend_selection.cuda and ndl.cpu_numpy().enabled()
    assert ndl.relu is ops.relu and ndl.TensorTuple is ndl.autograd.TensorTuple and ndl.ones is ndl.init.ones


@pytest.mark.parametrize(
    "backend, code, said", [("nd", 0, ""), ("np", 0, ""), ("torch", 1, "RuntimeError: NEEDLE_BACKEND is 'torch'")]
)
def test_importing_prints_nothing_unless_the_backend_is_unknown(backend, code, said):
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import needle"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "NEEDLE_BACKEND": backend},
    )  # fmt: skip
    assert done.returncode == code and done.stdout == "" and said in done.stderr and bool(said) == bool(done.stderr)


@pytest.mark.parametrize(("m", "n", "p"), [(24, 16, 8), (512, 512, 264)], ids=str)  # for one thread; for several
def test_tiled_products(cpu, m, n, p):
    a, b = np.random.randn(m, n), np.random.randn(n, p)
    tile = cpu.__tile_size__

    def tiled(x):
        rows, cols = x.shape
        return ndl.NDArray(x, device=cpu).reshape((rows // tile, tile, cols // tile, tile)).permute((0, 2, 1, 3)).compact()

    out = ndl.NDArray.make((m // tile, p // tile, tile, tile), device=cpu)
    cpu.matmul_tiled(tiled(a)._handle, tiled(b)._handle, out._handle, m, n, p)
    np.testing.assert_allclose(out.permute((0, 2, 1, 3)).compact().reshape((m, p)).numpy(), a @ b, rtol=1e-4, atol=1e-4)


def test_device_module_calls(cpu):
    a = np.random.randn(24, 16)
    x = ndl.NDArray(a, device=cpu)
    assert x[1:3]._handle.ptr() == x._handle.ptr() and x[1, 2].shape == (1, 1)
    assert x.sum().shape == (1,) and (x >= 0).numpy().sum() == (a >= 0).sum()


def test_optimizers_follow_their_formulas(host):
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((4, 3)), rng.standard_normal((3, 4, 3))

    def run(make):
        p = nn.Parameter(start, device=host, dtype="float64")
        opt = make([p])
        for g in grads:
            p.grad = ndl.Tensor(g, device=host, dtype="float64")
            opt.step()
            np.testing.assert_array_equal(p.grad.numpy(), g)
        return p.numpy()

    w, u = start.copy(), 0.0
    for g in grads:
        u = 0.9 * u + 0.1 * (g + 0.01 * w)
        w = w - 0.1 * u
    np.testing.assert_allclose(run(lambda p: ndl.optim.SGD(p, 0.1, 0.9, 0.01)), w, rtol=1e-12)
    for decoupled in (False, True):
        w, m, v = start.copy(), 0.0, 0.0
        for t, g in enumerate(grads, 1):
            g = g if decoupled else g + 0.1 * w
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            w = w * (1 - 0.01 * 0.1 * decoupled) - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        if decoupled:
            found = run(lambda p: ndl.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1))
        else:
            found = run(lambda p: ndl.optim.Adam(p, 0.01, 0.9, 0.95, 1e-8, 0.1))
        np.testing.assert_allclose(found, w, rtol=1e-10)


@pytest.mark.parametrize("make", [ndl.optim.Adam, ndl.optim.AdamW])
def test_each_parameter_counts_its_own_steps(host, make):
    """One that is frozen for some steps goes on as if they had not been; a state that is loaded keeps the counts."""
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal(3), rng.standard_normal((4, 3))

    def run(steps, renew=lambda opt, p: opt):
        p = [nn.Parameter(values, device=host, dtype="float64") for values in (start, np.ones(2))]
        opt = make(p, lr=0.1)
        for g in steps:
            p[0].grad = None if g is None else ndl.Tensor(g, device=host, dtype="float64")
            p[1].grad = ndl.Tensor(np.ones(2), device=host, dtype="float64")
            opt.step()
            opt = renew(opt, p)
        return [*(q.numpy() for q in p), opt.state_dict()]

    def loaded(opt, p):
        again = make(p, lr=0.1)
        again.load_state_dict(opt.state_dict())
        return again

    plain, _, whole = run(grads)
    late = [None, None, *grads[:2], None, *grads[2:]]
    frozen, other, state = run(late)
    np.testing.assert_array_equal(frozen, plain)
    assert whole["t"] == 4 and "t.0" not in whole and state["t"] == 7 and state["t.0"] == 4 and "t.1" not in state
    for found, wanted in zip(run(late, loaded)[:2], (frozen, other)):
        np.testing.assert_array_equal(found, wanted)


def test_clipping(host):
    p = [nn.Parameter(np.zeros(3), device=host), nn.Parameter(np.zeros((2, 2)), device=host)]
    values = [np.array([3.0, 0, 0]), np.array([[0, 4.0], [0, 0]])]
    for q, g in zip(p, values):
        q.grad = ndl.Tensor(g, device=host)
    opt = ndl.optim.AdamW(p, lr=0.1)
    assert abs(opt.clip_grad_norm(1.0).item() - 5) < 1e-6
    opt.step()
    np.testing.assert_allclose(opt.m[p[0]].numpy(), 0.1 * values[0] / 5, rtol=1e-5)
    np.testing.assert_array_equal(p[0].grad.numpy(), values[0])

    def check_a_step_that_is_not_clipped():
        before = opt.m[p[0]].numpy()
        opt.step()
        np.testing.assert_allclose(opt.m[p[0]].numpy(), 0.9 * before + 0.1 * values[0], rtol=1e-5)

    check_a_step_that_is_not_clipped()  # the clipping was for one step
    opt.clip_grad_norm(1.0)
    opt.reset_grad()  # and goes with the gradients that it was of
    p[0].grad = ndl.Tensor(values[0], device=host)
    check_a_step_that_is_not_clipped()


@pytest.mark.parametrize("make", [ndl.optim.SGD, ndl.optim.Adam])
def test_clipping_in_place(host, make):
    """Of those with a gradient; a norm that is small enough changes nothing."""
    p = [nn.Parameter(np.zeros(2), device=host) for _ in range(3)]
    for q, g in zip(p[::2], ([3.0, 0], [0, 4.0])):
        q.grad = ndl.Tensor(g, device=host)
    opt = make(p)
    small = 3e-6 / (5 + 1)  # of a norm of 5e-6, to which 1e-6 is added as in PyTorch
    for max_norm, norm, kept in ((10, 5, 1), (1, 5, 0.2), (1, 1, 0.2), (5e-6, 1, 1e-6), (3e-6, 5e-6, small)):
        assert abs(opt.clip_grad_norm(max_norm) - norm) < 1e-5
        assert p[1].grad is None
        np.testing.assert_allclose(p[0].grad.numpy(), [3 * kept, 0], rtol=1e-5)
        np.testing.assert_allclose(p[2].grad.numpy(), [0, 4 * kept], rtol=1e-5)


def test_layers_against_numpy(host):
    np.random.seed(3)
    x = np.random.randn(5, 7, 4).astype(np.float32)
    rnn = nn.RNN(4, 6, 1, device=host)
    out, h = rnn(ndl.Tensor(x, device=host))
    cell, state = rnn.rnn_cells[0], np.zeros((7, 6))
    for t in range(5):
        state = np.tanh(x[t] @ cell.W_ih.numpy() + cell.bias_ih.numpy() + state @ cell.W_hh.numpy() + cell.bias_hh.numpy())
        np.testing.assert_allclose(out.numpy()[t], state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(h.numpy()[0], state, rtol=1e-4, atol=1e-5)
    lstm = nn.LSTM(4, 6, 1, device=host)
    out, (h, c) = lstm(ndl.Tensor(x, device=host))
    cell, hs, cs = lstm.lstm_cells[0], np.zeros((7, 6)), np.zeros((7, 6))
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    for t in range(5):
        z = x[t] @ cell.W_ih.numpy() + cell.bias_ih.numpy() + hs @ cell.W_hh.numpy() + cell.bias_hh.numpy()
        i, f, g, o = np.split(z, 4, axis=1)
        cs = sigmoid(f) * cs + sigmoid(i) * np.tanh(g)
        hs = sigmoid(o) * np.tanh(cs)
    np.testing.assert_allclose(c.numpy()[0], cs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.numpy()[-1], hs, rtol=1e-4, atol=1e-5)


def test_conv_against_loops(host):
    x, w = np.random.randn(2, 3, 6, 5).astype(np.float32), None
    layer = nn.Conv(3, 4, 3, stride=2, device=host)
    y, w, b = layer(ndl.Tensor(x, device=host)).numpy(), layer.weight.numpy(), layer.bias.numpy()
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i in range(3):
        for j in range(3):
            patch = padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            np.testing.assert_allclose(y[:, :, i, j], np.einsum("nckl,klco->no", patch, w) + b, rtol=1e-4, atol=1e-4)


def test_random_numbers_are_drawn_in_the_courses_order():
    np.random.seed(42)
    layer = nn.Linear(3, 2)
    np.random.seed(42)
    bound = np.sqrt(2.0) * np.sqrt(3.0 / 3)
    np.testing.assert_allclose(layer.weight.numpy(), np.random.rand(3, 2) * 2 * bound - bound, rtol=1e-5, atol=1e-6)
    bound = np.sqrt(2.0) * np.sqrt(3.0 / 2)
    np.testing.assert_allclose(layer.bias.numpy(), (np.random.rand(2, 1) * 2 * bound - bound).T, rtol=1e-5, atol=1e-6)
    np.random.seed(0)
    dropped = nn.Dropout(0.4)(ndl.ones(5, 6)).numpy()
    np.random.seed(0)
    np.testing.assert_allclose(dropped, (np.random.rand(5, 6).astype(np.float32) <= 0.6) / 0.6, rtol=1e-6)
    data = ndl.data.NDArrayDataset(np.arange(100.0))
    np.random.seed(0)
    loader = ndl.data.DataLoader(data, 16, shuffle=True)
    batches = [batch[0].numpy() for batch in loader]
    np.random.seed(0)
    np.testing.assert_array_equal(np.concatenate(batches), np.random.permutation(100))
    assert len(batches) == 7 and len(batches[-1]) == 4


def test_mnist_files(tmp_path):
    images = np.random.randint(0, 256, (12, 28, 28), dtype=np.uint8)
    labels = np.arange(12, dtype=np.uint8) % 10
    with gzip.open(tmp_path / "x.gz", "wb") as file:
        file.write(struct.pack(">IIII", 2051, 12, 28, 28) + images.tobytes())
    with gzip.open(tmp_path / "y.gz", "wb") as file:
        file.write(struct.pack(">II", 2049, 12) + labels.tobytes())
    flip = ndl.data.RandomFlipHorizontal(1.0)
    data = ndl.data.MNISTDataset(str(tmp_path / "x.gz"), str(tmp_path / "y.gz"), transforms=[flip])
    np.testing.assert_array_equal(data[3][0][:, :, 0], images[3, :, ::-1] / np.float32(255))
    batch = next(iter(ndl.data.DataLoader(data, 5)))
    assert batch[0].shape == (5, 28, 28, 1) == data[0:5][0].shape and batch[1].numpy().tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "x.gz").write_bytes((tmp_path / "x.gz").read_bytes()[:40])
    with pytest.raises(ndl.data.datasets.mnist_dataset.DataError, match=r"x\.gz"):
        ndl.data.MNISTDataset(str(tmp_path / "x.gz"), str(tmp_path / "y.gz"))


def test_models_of_the_apps():
    from apps.models import LanguageModel, ResNet9

    assert sum(p.size for p in ResNet9().parameters()) == 431946
    for kind in ("rnn", "lstm", "transformer"):
        model = LanguageModel(20, 50, 32, 2, kind, seq_len=10)
        out, _ = model(ndl.Tensor(np.random.randint(0, 50, (1, 3))))
        out.backward()
        assert out.shape == (3, 50) and all(p.grad is not None for p in model.parameters())


def test_language_model_learns():
    from apps.models import LanguageModel
    from apps.simple_ml import evaluate_ptb, train_ptb

    ids = list(np.tile([3, 1, 4, 1, 5, 9, 2, 6], 40))
    data = ndl.data.batchify(ids, 4, ndl.cpu(), "float32")
    model = LanguageModel(16, 10, 16, 1, "lstm", device=ndl.cpu())
    train_ptb(model, data, seq_len=8, n_epochs=15, optimizer=ndl.optim.Adam, lr=0.02, device=ndl.cpu())
    assert evaluate_ptb(model, data, seq_len=8, device=ndl.cpu())[0] > 0.9


def _mlp(*middle):
    """Linear layers from 64 features to 16 classes, drawn in order."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), *middle, nn.Linear(32, 16))


PUBLISHED_LOSSES = [  # of homework 2's tests
    (_mlp, ndl.optim.SGD, {"lr": 0.01, "momentum": 0.0}, 3.207009),
    (_mlp, ndl.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}, 3.306993),
    (_mlp, ndl.optim.Adam, {"lr": 0.001}, 3.703999),
    (_mlp, ndl.optim.Adam, {"lr": 0.001, "weight_decay": 0.01}, 3.705134),
    (lambda: _mlp(nn.BatchNorm1d(32)), ndl.optim.Adam, {"lr": 0.001, "weight_decay": 0.001}, 3.296256),
    (lambda: _mlp(nn.LayerNorm1d(32)), ndl.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}, 2.82192),
]


@pytest.mark.parametrize("make, optimizer, options, published", PUBLISHED_LOSSES)
def test_losses_are_those_that_the_course_publishes(make, optimizer, options, published):
    np.random.seed(42)
    model = make()
    np.random.seed(1024 * 64 * 2)
    X = np.random.randint(0, 100, size=(1024, 64)) / 20
    np.random.seed(1024)
    y = np.random.randint(0, 16, size=1024)
    opt, loss_fn = optimizer(model.parameters(), **options), nn.SoftmaxLoss()
    for batch in np.split(np.arange(1024), 32):
        opt.reset_grad()
        loss = loss_fn(model(ndl.Tensor(X[batch])), ndl.Tensor(y[batch]))
        loss.backward()
        opt.step()
    np.testing.assert_allclose(loss.item(), published, rtol=1e-5)


def test_resnet9_gives_what_the_course_publishes(host):
    from apps.models import ResNet9

    np.random.seed(0)
    model = ResNet9(device=host)
    found = model(ndl.Tensor(np.random.randn(2, 3, 32, 32), device=host)).numpy()
    published = [
        [-1.8912625, 0.64833605, 1.9400386, 1.1435282, 1.89777, 2.9039745, -0.10433993, 0.35458302, -0.5684191, 2.6178317],
        [-0.2905612, -0.4147861, 0.90268034, 0.46530387, 1.3335679, 1.8534894, -0.1867125, -2.4298222, -0.5344223, 4.362149],
    ]
    assert np.linalg.norm(found - published) < 1e-4


def test_loss_and_error():
    from apps.simple_ml import loss_err

    scores = ndl.Tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [5.0, 0.0]])
    loss, error = loss_err(scores, np.array([0, 0, 0, 1], "uint8"))
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp([-2.0, 1.0, -3.0, 5.0]))), rtol=1e-6)
    assert error == 0.5


def test_classes_in_the_place_of_one_hot_rows():
    """They would broadcast, and give a loss below 0."""
    from apps.simple_ml import nn_epoch, softmax_loss

    for wrong in (ndl.Tensor([0, 1, 2]), ndl.Tensor([[0], [1], [2]])):
        with pytest.raises(ShapeError, match=r"\[softmax_loss\] y_one_hot is .* \(accepted: \(3, 3\), the shape of Z\)"):
            softmax_loss(ndl.Tensor(np.ones((3, 3))), wrong)
    weights = ndl.Tensor(np.ones((4, 5))), ndl.Tensor(np.ones((5, 2)))
    for classes, batch in (([0], 100), ([0, 1, 0], 0), ([0, 1, 0], -1)):
        with pytest.raises(ShapeError, match=rf"\[nn_epoch\] 3 rows, {len(classes)} classes, batch {batch} "):
            nn_epoch(np.ones((3, 4)), np.array(classes), *weights, batch=batch)


HOMEWORK_TESTS = (
    "test_autograd_hw test_nn_and_optim test_data test_ndarray test_nd_backend test_conv test_cifar_ptb_data test_sequence_models "
    "test_transformer"
)


def test_homeworks_fit_beside_these_tests(tmp_path):
    """In tests/hwN, chosen by name from the root as their notebooks do. pytest refuses two files of one name."""
    here = Path(__file__).parent
    assert not set(HOMEWORK_TESTS.split()) & {path.stem for path in here.rglob("test_*.py")}
    for name in ("pyproject.toml", "python", "apps"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tests" / "hw1").mkdir(parents=True)
    for name in ("conftest.py", "devices.py", "test_course.py"):
        (tmp_path / "tests" / name).write_text((here / name).read_text())
    (tmp_path / "tests" / "hw1" / "test_autograd_hw.py").write_text(
        "from simple_ml import *\nimport pytest\n@pytest.mark.slow\n"
        "def test_sum_forward(): assert ndl.backend_selection.BACKEND == 'np' and ndl.Tensor([1.0]).dtype == 'float64'\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-k", "forward"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "NEEDLE_BACKEND": "np"})
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_loops_are_found_from_the_root():
    code = "import sys; sys.path[0] = './apps'; import simple_ml"  # a script has its own folder there, not the root
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_np_backend():
    """Homework 1 and 2's backend, which a process chooses when it starts."""
    code = Path(__file__).with_name("course_np_backend.py")
    done = subprocess.run(
        [sys.executable, str(code)], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NEEDLE_BACKEND": "np"}
    )
    assert done.returncode == 0 and done.stdout.strip() == "np backend: all held", done.stdout + done.stderr
