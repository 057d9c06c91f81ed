"""A small real use of each package: the lines that import it, and the code that uses it.

The programs print only values that do not depend on the run, so that two runs can be compared. In a job every rank runs
them alone, on its own device and in its own current directory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """A program. `imports`: its leading block of imports; `code`: the rest."""

    imports: str
    code: str


USES: dict[str, Use] = {
    "flax": Use(
        "import flax.linen as nn\nfrom flax import nnx\nimport jax\nimport numpy as np\n",
        """
data = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
loss, grads = nnx.jit(nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean()))(model, data)
dense = nn.Dense(3)
params = dense.init(jax.random.key(0), data)
print(f"{loss:.5f}", jax.tree.map(np.shape, params), dense.apply(params, data).shape)
""",
    ),
    "optax": Use(
        "import jax\nimport numpy as np\nimport optax\n",
        """
params = {"w": np.ones(4, np.float32)}
tx = optax.adamw(1e-2)
state = tx.init(params)
for _ in range(3):
    grads = jax.grad(lambda p: (p["w"] ** 2).sum())(params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
print(f"{params['w'].sum():.5f}")
""",
    ),
    "orbax.checkpoint": Use(
        "import os\nimport numpy as np\nimport orbax.checkpoint as ocp\n",
        """
path = os.path.abspath("checkpoint")
options = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()}, primary_host=jax.process_index(),
    barrier_sync_key_prefix=f"rank{jax.process_index()}")
handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
    checkpointer.save(path, {"a": np.arange(4.0)})
    print(checkpointer.restore(path)["a"].tolist())
""",
    ),
    "chex": Use(
        "import chex\nimport numpy as np\n",
        """
@chex.dataclass
class State:
    x: chex.Array

chex.assert_shape(np.ones((2, 3)), (2, 3))
print(jax.tree.map(lambda x: x + 1, State(x=np.zeros(2))).x.tolist())
""",
    ),
    "equinox": Use(
        "import equinox as eqx\nimport jax\n",
        """
model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
step = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: jax.vmap(m)(x).sum()))
loss, grads = step(model, jax.numpy.ones((4, 2)))
print(f"{loss:.4f}")
""",
    ),
    "jaxtyping": Use(
        "import jaxtyping\nfrom jaxtyping import Array, Float\n",
        """
@jaxtyping.jaxtyped(typechecker=None)
def double(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return 2 * x

print(double(jax.numpy.ones(2)).tolist(), isinstance(jax.numpy.ones((2, 2)), Float[Array, "n"]))
""",
    ),
    "einops": Use(
        "import einops\nimport jax\n",
        """
print(einops.rearrange(jax.numpy.arange(6).reshape(2, 3), "a b -> (b a)").tolist())
""",
    ),
    "numpyro": Use(
        "import jax\nimport numpyro\nimport numpyro.distributions as dist\nfrom numpyro.infer import MCMC, NUTS\n",
        """
def model():
    numpyro.sample("x", dist.Normal(1.0, 0.5))

mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=30, progress_bar=False)
mcmc.run(jax.random.key(0))
print(f"{mcmc.get_samples()['x'].mean():.4f}")
""",
    ),
    "blackjax": Use(
        "import blackjax\nimport jax\nimport jax.numpy as jnp\n",
        """
nuts = blackjax.nuts(lambda x: -0.5 * (x**2).sum(), step_size=0.5, inverse_mass_matrix=jnp.ones(2))
state = nuts.init(jnp.ones(2))
state, info = jax.jit(nuts.step)(jax.random.key(0), state)
print(state.position.round(4).tolist())
""",
    ),
    "diffrax": Use(
        "import diffrax\nimport jax.numpy as jnp\n",
        """
term = diffrax.ODETerm(lambda t, y, args: -y)
found = diffrax.diffeqsolve(term, diffrax.Tsit5(), t0=0, t1=1, dt0=0.1, y0=jnp.array([1.0]))
print(f"{found.ys[-1, 0]:.4f}")
""",
    ),
    "brax": Use(
        "import jax\nfrom brax import envs\n",
        """
env = envs.create("fast")
state = jax.jit(env.reset)(jax.random.key(0))
state = jax.jit(env.step)(state, jax.numpy.zeros(env.action_size))
print(state.obs.shape, float(state.reward))
""",
    ),
    "distrax": Use(
        "import distrax\nimport jax\n",
        """
print(f"{distrax.Normal(0.0, 1.0).log_prob(0.5):.4f}")
print(distrax.Categorical(jax.numpy.zeros(3)).sample(seed=jax.random.key(1)))
""",
    ),
    "haiku": Use(
        "import haiku as hk\nimport jax\n",
        """
net = hk.transform(lambda x: hk.Linear(3)(x).sum())
params = net.init(jax.random.key(0), jax.numpy.ones((2, 4)))
print(f"{jax.jit(net.apply)(params, jax.random.key(1), jax.numpy.ones((2, 4))):.4f}")
""",
    ),
    "grain": Use(
        "import grain.python as pygrain\nimport numpy as np\n",
        """
class Double(pygrain.MapTransform):
    def map(self, x):
        return 2 * x

loader = pygrain.DataLoader(
    data_source=np.arange(8),
    sampler=pygrain.IndexSampler(8, pygrain.NoSharding(), shuffle=False, num_epochs=1),
    operations=[Double(), pygrain.Batch(4)],
    worker_count=0,
)
print([batch.tolist() for batch in loader])
print(sum(pygrain.MapDataset.range(10).to_iter_dataset(pygrain.ReadOptions(num_threads=2))))
""",
    ),
    "matplotlib": Use(
        "import os\nimport matplotlib.pyplot as plt\n",
        """
plt.switch_backend("Agg")
plt.plot([1, 2, 3])
plt.savefig("plot.png")
print(os.path.getsize("plot.png"))
""",
    ),
    "pandas": Use(
        "import pandas as pd\n",
        """
frame = pd.DataFrame({"a": [1, 2, 2], "b": [1.0, 2.0, 3.0]})
frame.to_csv("frame.csv")
print(pd.read_csv("frame.csv").groupby("a").b.sum().tolist())
""",
    ),
    "scipy": Use(
        "import numpy as np\nimport scipy\nimport scipy.linalg\nimport scipy.optimize\nimport scipy.stats\n",
        """
matrix = np.random.default_rng(0).normal(size=(300, 300))
print(np.abs(scipy.linalg.inv(matrix) @ matrix - np.eye(300)).max() < 1e-6, f"{scipy.linalg.svdvals(matrix)[0]:.6f}")
least = scipy.optimize.minimize(lambda x: ((x - 1) ** 2).sum(), np.zeros(3))
print(f"{least.x.sum():.4f} {scipy.stats.norm.cdf(1):.5f}")
""",
    ),
    "sklearn": Use(
        "import numpy as np\nfrom sklearn.cluster import KMeans\nfrom sklearn.ensemble import RandomForestClassifier\n",
        """
points = np.random.default_rng(0).normal(size=(400, 8))
labels = points[:, 0] > 0
forest = RandomForestClassifier(20, n_jobs=2, random_state=0).fit(points, labels)
print(f"{forest.score(points, labels):.3f} {KMeans(3, random_state=0, n_init=2).fit(points).inertia_:.3f}")
""",
    ),
    "absl": Use(
        "from absl import flags\nfrom absl import logging\nfrom absl import app\n",
        """
flags.DEFINE_integer("steps", 3, "how many")
flags.FLAGS(["program", "--steps=5"])
logging.set_verbosity(logging.INFO)
logging.use_absl_handler()
logging.info("to stderr")
print(flags.FLAGS.steps, logging.get_absl_handler() is not None)
""",
    ),
    "tqdm": Use(
        "from tqdm import tqdm, trange\n",
        """
print(sum(tqdm(range(5), disable=None)), sum(trange(4, disable=True)))
""",
    ),
    "tyro": Use(
        "import dataclasses\nimport tyro\n",
        """
@dataclasses.dataclass
class Config:
    steps: int = 3

print(tyro.cli(Config, args=["--steps", "4"]))
""",
    ),
    "hydra": Use(
        "import os\nimport hydra\nfrom hydra import compose, initialize_config_dir\n",
        """
os.makedirs("conf", exist_ok=True)
open("conf/config.yaml", "w").write("steps: 3\\n")
with initialize_config_dir(os.path.abspath("conf"), version_base=None):
    print(compose("config", overrides=["steps=5"]))
""",
    ),
    "omegaconf": Use(
        "from omegaconf import OmegaConf\n",
        """
print(OmegaConf.to_yaml(OmegaConf.merge({"a": {"b": 1}}, {"a": {"c": "${a.b}"}})))
""",
    ),
    "netket": Use(
        "import netket as nk\n",
        """
graph = nk.graph.Chain(4)
hilbert = nk.hilbert.Spin(0.5, 4)
print(f"{nk.exact.lanczos_ed(nk.operator.Ising(hilbert, graph, h=1.0))[0]:.4f}")
""",
    ),
    "mpi4py": Use(
        "import mpi4py\n",
        """
print(mpi4py.rc.initialize, "mpi4py.MPI" in sys.modules)
""",
    ),
    "transformers": Use(
        "from transformers import AutoTokenizer\nimport tokenizers\n",
        """
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
print([one.ids for one in tokenizer.encode_batch(["a b c"] * 50)][0], AutoTokenizer.__name__)
""",
    ),
    "datasets": Use(
        "import datasets\n",
        """
table = datasets.Dataset.from_dict({"x": list(range(8))})
print(table.map(lambda row: {"y": row["x"] * 2}, num_proc=None)["y"][:])
""",
    ),
    "tensorstore": Use(
        "import os\nimport numpy as np\nimport tensorstore as ts\n",
        """
spec = {
    "driver": "zarr",
    "kvstore": {"driver": "file", "path": os.path.abspath("store")},
    "metadata": {"dtype": "<f4", "shape": [100, 100], "chunks": [10, 10]},
}
store = ts.open(spec, create=True).result()
store[...] = np.ones((100, 100), np.float32)
print(float(store.read().result().sum()))
""",
    ),
    "keras": Use(
        "import keras\nimport numpy as np\n",
        """
model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 3)), np.ones(8), verbose=0)
print(keras.backend.backend(), model.predict(np.ones((2, 3)), verbose=0).shape)
""",
    ),
    "lineax": Use(
        "import jax.numpy as jnp\nimport lineax\n",
        """
print(lineax.linear_solve(lineax.MatrixLinearOperator(2 * jnp.eye(2)), jnp.ones(2)).value.tolist())
""",
    ),
    "optimistix": Use(
        "import jax.numpy as jnp\nimport optimistix\n",
        """
found = optimistix.root_find(lambda y, args: y**2 - 2, optimistix.Newton(rtol=1e-5, atol=1e-5), jnp.array(1.0))
print(f"{found.value:.4f}")
""",
    ),
    "jaxopt": Use(
        "import jax.numpy as jnp\nimport jaxopt\n",
        """
print(f"{jaxopt.GradientDescent(lambda x: ((x - 1) ** 2).sum()).run(jnp.zeros(2)).params.sum():.4f}")
""",
    ),
    "seaborn": Use(
        "import os\nimport seaborn as sns\n",
        """
sns.lineplot(x=[1, 2, 3], y=[1, 4, 9]).figure.savefig("plot.png")
print(os.path.getsize("plot.png"))
""",
    ),
    "tokenizers": Use(
        "from tokenizers import Tokenizer, models, pre_tokenizers\n",
        """
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
print([one.ids for one in tokenizer.encode_batch(["a b c"] * 500)][-1])
""",
    ),
    "huggingface_hub": Use(
        "import huggingface_hub\nfrom huggingface_hub import HfApi\n",
        """
print(HfApi().endpoint, huggingface_hub.constants.HF_HUB_OFFLINE)
""",
    ),
    "safetensors": Use(
        "import numpy as np\nfrom safetensors.numpy import load_file, save_file\n",
        """
save_file({"x": np.ones(3)}, "x.safetensors")
print(load_file("x.safetensors")["x"].tolist())
""",
    ),
    "h5py": Use(
        "import h5py\nimport numpy as np\n",
        """
with h5py.File("x.h5", "w") as file:
    file["x"] = np.arange(5)
with h5py.File("x.h5") as file:
    print(file["x"][:].tolist())
""",
    ),
    "PIL": Use(
        "from PIL import Image\n",
        """
Image.new("RGB", (8, 8), "red").save("x.png")
print(Image.open("x.png").getpixel((1, 1)))
""",
    ),
    "yaml": Use("import yaml\n", """print(yaml.safe_load("a: [1, 2]"))"""),
    "pyarrow": Use(
        "import pyarrow as pa\nimport pyarrow.compute as pc\nimport pyarrow.parquet as pq\n",
        """
pq.write_table(pa.table({"x": list(range(100_000))}), "x.parquet")
print(pc.sum(pq.read_table("x.parquet")["x"]))
""",
    ),
}
