"""deepmd-kit's trainer on TensorFlow's sessions: ``dp --tf train``, on data that are made here."""

import json
from pathlib import Path

import numpy as np

STEPS = 20
ATOMS, FRAMES = 6, 12

INPUT = {
    "model": {
        "type_map": ["A", "B"],
        "descriptor": {
            "type": "se_e2_a",
            "rcut": 4.0,
            "rcut_smth": 0.5,
            "sel": [6, 6],
            "neuron": [4, 8],
            "axis_neuron": 2,
            "seed": 1,
        },
        "fitting_net": {"neuron": [8, 8], "seed": 1},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 0.0001, "decay_steps": 10},
    "loss": {"type": "ener"},
    "training": {
        "training_data": {"systems": ["data"], "batch_size": 2},
        "numb_steps": STEPS,
        "seed": 1,
        "disp_file": "lcurve.out",
        "disp_freq": 5,
        "save_freq": STEPS,
    },
}


def make_data(folder: Path) -> None:
    """One system of two kinds of atoms, held to their places by springs, whose energy it has."""
    random = np.random.default_rng(7)
    places = random.uniform(1, 7, (ATOMS, 3))
    moved = random.normal(scale=0.1, size=(FRAMES, ATOMS, 3))
    frames = folder / "set.000"
    frames.mkdir(parents=True)
    (folder / "type.raw").write_text("\n".join("010101") + "\n")
    (folder / "type_map.raw").write_text("A\nB\n")
    np.save(frames / "coord.npy", (places + moved).reshape(FRAMES, -1))
    np.save(frames / "box.npy", np.tile(8.0 * np.eye(3).ravel(), (FRAMES, 1)))
    np.save(frames / "energy.npy", 0.5 * (moved**2).sum(axis=(1, 2)))
    np.save(frames / "force.npy", -moved.reshape(FRAMES, -1))


def main() -> None:
    import horovod.tensorflow as hvd
    from deepmd.main import main as dp

    hvd.init()
    if hvd.rank() == 0:
        make_data(Path("data"))
        Path("input.json").write_text(json.dumps(INPUT))
    hvd.allgather_object("data are there")
    dp(["--tf", "train", "--mpi-log", "workers", "input.json"])
    if hvd.rank() == 0:
        curve = np.loadtxt("lcurve.out")
        assert curve[-1, 0] == STEPS, curve
        assert np.isfinite(curve).all(), curve
        assert Path(f"model.ckpt-{STEPS}.index").is_file()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
