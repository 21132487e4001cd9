// Runs requests that a reader has dragged, under all policies of the page: JSON in, JSON out.
import { reason, start } from "./pyodide-package.mjs";

let runs = null;

onmessage = async ({ data }) => {
  try {
    runs ??= (await start()).pyodide.pyimport("mooncake_lab.book.playground.batches").runs;
    postMessage({ runs: runs(data) });
  } catch (error) {
    postMessage({ error: reason(error) });
  }
};
