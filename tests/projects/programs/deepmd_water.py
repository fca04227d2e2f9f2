"""DeePMD-kit: data for `dp train`, in its format: molecules like water, with a pair potential for energies.

deepmd_water.py FOLDER writes FOLDER/data and FOLDER/input.json.
"""

import json
import sys
from pathlib import Path

import numpy as np

MOLECULES, FRAMES, BOX = 8, 40, 8.0


def energy_and_forces(positions: np.ndarray, cell: float) -> tuple[float, np.ndarray]:
    """Return those of a soft pair potential within 4 A, of the nearest images."""
    apart = positions[:, None] - positions[None]
    apart -= cell * np.round(apart / cell)
    distance = np.sqrt((apart**2).sum(-1)) + np.eye(len(positions)) * cell
    reach = np.clip(1 - distance / 4.0, 0, None)
    forces = (2 * reach / 4.0 / distance)[:, :, None] * apart
    return float((reach**2).sum() / 2), forces.sum(1)


def main(folder: Path) -> None:
    chosen = np.random.default_rng(0)
    molecule = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    corners = np.stack(np.meshgrid(*[np.arange(2) * BOX / 2] * 3), -1).reshape(-1, 3)
    frames = (corners[:, None] + molecule).reshape(1, -1, 3)
    frames = frames + chosen.normal(scale=0.1, size=(FRAMES, MOLECULES * 3, 3))
    found = [energy_and_forces(frame, BOX) for frame in frames]
    data = folder / "data" / "set.000"
    data.mkdir(parents=True)
    np.save(data / "coord.npy", frames.reshape(FRAMES, -1))
    np.save(data / "energy.npy", np.array([energy for energy, _ in found]).reshape(FRAMES, 1))
    np.save(data / "force.npy", np.array([forces for _, forces in found]).reshape(FRAMES, -1))
    np.save(data / "box.npy", np.tile(np.eye(3).ravel() * BOX, (FRAMES, 1)))
    (folder / "data" / "type.raw").write_text("\n".join(["0", "1", "1"] * MOLECULES) + "\n")
    (folder / "data" / "type_map.raw").write_text("O\nH\n")
    # As in examples/water/se_e2_a of DeePMD-kit, but smaller.
    systems = {"systems": [str(folder / "data")], "batch_size": 1}
    settings = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {
                "type": "se_e2_a", "sel": [16, 32], "rcut_smth": 0.5, "rcut": 3.9, "neuron": [4, 8],
                "resnet_dt": False, "axis_neuron": 4, "type_one_side": True, "precision": "float64",
                "seed": 1,
            },
            "fitting_net": {"neuron": [16, 16], "resnet_dt": True, "precision": "float64", "seed": 1},
        },
        "learning_rate": {"type": "exp", "decay_steps": 50, "start_lr": 0.01, "stop_lr": 1e-4},
        "loss": {
            "type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1,
            "start_pref_v": 0, "limit_pref_v": 0,
        },
        "training": {
            "training_data": systems, "numb_steps": 40, "seed": 10, "disp_file": str(folder / "lcurve.out"),
            "disp_freq": 10, "save_freq": 40, "save_ckpt": str(folder / "model.ckpt"),
        },
    }  # fmt: skip
    (folder / "input.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
