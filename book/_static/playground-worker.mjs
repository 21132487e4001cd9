// Runs the simulator beside the page: Pyodide, the wheels, this package, and the traces that were asked for.
import { fetched, reason, start, text } from "./pyodide-package.mjs";

const known = new Set();
let started = null;

async function loaded() {
  const { pyodide, manifest } = await start();
  const { Simulator } = pyodide.pyimport("mooncake_lab.book.playground.simulator");
  return { pyodide, manifest, simulator: Simulator(await text("nodes.json")) };
}

async function run({ trace, file, blockSize, settings }) {
  if (!started) postMessage({ kind: "status", text: "Loading the simulator (about 15 MB, once)…" });
  const { pyodide, manifest, simulator } = await (started ??= loaded());
  const name = file ? `own ${file.name} ${file.size} ${file.lastModified} ${blockSize}` : trace;
  if (!known.has(name)) {
    const path = file ? "/your trace" : `/${manifest.traces[trace]}`;
    pyodide.FS.writeFile(path, file ? new Uint8Array(await file.arrayBuffer()) : await fetched(manifest.traces[trace]));
    try {
      simulator.read(name, path, file?.name, blockSize ?? undefined);
    } finally {
      pyodide.FS.unlink(path);
    }
    known.add(name);
  }
  postMessage({ kind: "status", text: "Simulating…" });
  const ended = (count) => postMessage({ kind: "status", text: `Simulating: ${count.toLocaleString("en")} requests have ended…` });
  return JSON.parse(simulator.run(name, JSON.stringify(settings), ended));
}

onmessage = async ({ data }) => {
  try {
    postMessage({ kind: "result", result: await run(data) });
  } catch (error) {
    if (!("type" in error)) { // no Python exception: what was loaded may be broken
      started = null;
      known.clear();
    }
    postMessage({ kind: "error", text: reason(error) });
  }
};
