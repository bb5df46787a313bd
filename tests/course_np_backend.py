"""Run by test_course.py with NEEDLE_BACKEND=np: what homework 1 and 2 expect of that backend."""

import pickle
import sys

sys.path[:0] = ["python", "apps", "."]
import numpy as np  # noqa: E402

import needle as ndl  # noqa: E402
from needle import memory, nn  # noqa: E402

assert ndl.backend_selection.BACKEND == "np" and repr(ndl.cpu()) == "needle.cpu()" and not hasattr(ndl, "cuda")
device = ndl.cpu()
assert device == ndl.default_device() == ndl.backend_numpy.CPUDevice() and ndl.all_devices() == [device] and device.enabled()
assert len({device, ndl.backend_numpy.CPUDevice()}) == 1 and isinstance(device, ndl.backend_numpy.CPUDevice)
np.random.seed(0)
drawn = device.randn(2, 3), device.rand(4)
np.random.seed(0)
for array, values in zip(drawn, (np.random.randn(2, 3), np.random.rand(4))):
    np.testing.assert_array_equal(array, values)
    assert array.dtype == "float64"
for array, values in (
    (device.zeros(2, 3), np.zeros((2, 3))), (device.ones(2, dtype="int32"), np.ones(2)), (device.full((2,), 7, dtype="float32"), [7, 7]),
    (device.one_hot(3, np.array([2, 0]), dtype="float32"), np.eye(3)[[2, 0]]),
):  # fmt: skip
    np.testing.assert_array_equal(array, values)
assert (
    device.empty((2, 3), dtype="float32").shape == (2, 3)
    and device.zeros(1).dtype == "float32"
    and device.ones(1, dtype="int32").dtype == "int32"
)
x = ndl.Tensor([1.0, 2.0, 3.0])
assert x.dtype == "float64" and ndl.Tensor([1, 2]).dtype == "int64" and x.sum().shape == () and ndl.Tensor(5).shape == ()
assert isinstance(x.cached_data.astype("float32"), ndl.NDArray)
np.testing.assert_allclose(x.cached_data, [1, 2, 3])
np.testing.assert_allclose((x * np.random.randn(1)).numpy().shape, (3,))
a, b = ndl.Tensor(np.random.rand(1, 3) + 1), ndl.Tensor(np.random.rand(3) + 1)
(a**b).sum().backward()
assert a.grad.shape == (1, 3) and b.grad.shape == (3,)
np.testing.assert_allclose(a.grad.numpy(), b.numpy() * a.numpy() ** (b.numpy() - 1))
m, n = ndl.Tensor(np.random.randn(6, 5, 4)), ndl.Tensor(np.random.randn(4, 2))
(m @ n).sum().backward()
np.testing.assert_allclose(n.grad.numpy(), np.einsum("abk,abn->kn", m.numpy(), np.ones((6, 5, 2))))
out = a.sum()
np.testing.assert_allclose(out.op.gradient_as_tuple(ndl.Tensor(2.0), out)[0].numpy(), np.full((1, 3), 2.0))
with ndl.amp.autocast("cpu"):
    half = ndl.Tensor(np.ones((2, 2), "float32"))
    assert (half @ half).dtype == "bfloat16"
np.random.seed(1)
from mlp_resnet import MLPResNet, epoch  # noqa: E402

data = ndl.data.NDArrayDataset(np.random.randn(64, 16).astype("float32"), np.random.randint(0, 4, 64))
model = MLPResNet(16, 12, num_blocks=1, num_classes=4)
opt = ndl.optim.Adam(model.parameters(), lr=0.01)
before = epoch(ndl.data.DataLoader(data, 16), model)[1]
counts = []
for _ in range(8):
    after = epoch(ndl.data.DataLoader(data, 16, shuffle=True), model, opt)[1]
    counts.append(ndl.autograd.TENSOR_COUNTER)
assert after < before and counts[1] == counts[-1], (before, after, counts)
bias = nn.Parameter(np.zeros((1, 5), "float32"), dtype="float32")
bias.data = ndl.Tensor(np.ones(5, "float32"))
assert bias.shape == (5,)
from simple_ml import nn_epoch  # noqa: E402

W1, W2 = ndl.Tensor(np.random.randn(16, 8) * 0.3), ndl.Tensor(np.random.randn(8, 4) * 0.3)
X, y = np.random.randn(50, 16), np.random.randint(0, 4, 50)
N1, N2 = nn_epoch(X, y, W1, W2, lr=0.2, batch=50)
h = np.maximum(X @ W1.numpy(), 0)
z = np.exp(h @ W2.numpy())
g = (z / z.sum(1, keepdims=True) - np.eye(4)[y]) / 50
np.testing.assert_allclose(N2.numpy(), W2.numpy() - 0.2 * h.T @ g)
np.testing.assert_allclose(N1.numpy(), W1.numpy() - 0.2 * X.T @ ((h > 0) * (g @ W2.numpy().T)))


def build(device):
    model = nn.Sequential(nn.Linear(16, 8, device=device), nn.ReLU(), nn.Linear(8, 4, device=device))
    optimizer = ndl.optim.Adam(model.parameters())

    def step():
        optimizer.reset_grad()
        nn.SoftmaxLoss()(model(ndl.Tensor(X, device=device)), ndl.Tensor(y, device=device)).backward()
        optimizer.step()

    return step


assert memory.peak_bytes(build) == memory.peak_bytes(build, device=device)  # float64 and all
kept = build(device)
assert nn.SoftmaxLoss()(ndl.Tensor(np.ones((2, 3))), ndl.Tensor(np.array([0, 1]))).shape == ()
hidden, weight = ndl.Tensor(np.random.randn(2, 4)), ndl.Tensor(np.random.randn(4, 3))
fused = ndl.ops.linear_cross_entropy(hidden, weight, ndl.Tensor(np.array([0, 2])))
fused.backward(create_graph=True)
(hidden.grad * hidden.grad).sum().backward()
assert fused.shape == () and hidden.grad.shape == (2, 4)
taken = ndl.from_dlpack(np.ones(3, "float32"))
assert (taken + ndl.ones(3)).numpy().tolist() == [2, 2, 2] and taken.dtype == "float32"
submitted = pickle.loads(pickle.dumps(ndl.Tensor([[1.0, 2.0]]).cached_data))
assert type(submitted) is np.ndarray and submitted.tolist() == [[1, 2]]
assert memory.process()["arrays"] >= memory.stats().live > 0
memory.set_limit(memory.stats().live + 8 * 50 * 16, device)
try:
    kept()
except MemoryError as error:
    assert "largest holders" in str(error) and "modules.0" in str(error), error
else:
    raise AssertionError
print("np backend: all held")


class Own(ndl.autograd.TensorOp):
    """An op of homework 1 in numpy's functions, one of which is not needle's."""

    def __init__(self, function):
        self.function = function

    def compute(self, a):
        return self.function(a)

    def gradient(self, out_grad, node):
        return out_grad * Own(np.cos)(node.inputs[0])


array_api = ndl.autograd.array_api
assert array_api.swapaxes is np.swapaxes and array_api.NDArray is ndl.NDArray and not hasattr(array_api, "no such function")
for lazy in (False, True):
    ndl.autograd.LAZY_MODE = lazy
    x = ndl.Tensor(np.random.randn(3))
    y = Own(np.sin)(x * 2)
    y.sum().backward()
    assert isinstance(y.realize_cached_data(), ndl.NDArray) and y.dtype == "float64"
    np.testing.assert_allclose(y.numpy(), np.sin(2 * x.numpy()))
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.cos(2 * x.numpy()))
    assert Own(np.max)(x).shape == () and Own(lambda a: np.swapaxes(a, 0, -1))(ndl.ones(2, 3)).shape == (3, 2)
    try:
        Own(lambda a: [1.0])(x).numpy()
    except ndl.errors.DTypeError as error:
        assert str(error) == "[Own] compute gave a list (accepted: an NDArray)", error
    else:
        raise AssertionError("a list is no array")
