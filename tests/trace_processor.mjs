// Perfetto's trace processor in Node: load traces, answer SQL about each.
//
//     node trace_processor.mjs ASSETS < questions.json > answers.json
//
// ASSETS is a folder with Perfetto's engine as WebAssembly (trace_processor.wasm and its loader engine_bundle.node.js,
// which expects to be a web worker) and the client of its RPC (engine.mjs). Questions are a JSON list of pairs, a file
// and a list of SQL texts; answered is for each pair a list with, for each text, its rows as objects.

import {readFileSync} from 'node:fs';
import {join} from 'node:path';
import {pathToFileURL} from 'node:url';
import {runInThisContext} from 'node:vm';

const [assets] = process.argv.slice(2);
console.log = console.warn = console.error; // stdout is for rows

// What a worker has and Node has not: a scope called self, an address, and synchronous requests for files beside it.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.importScripts = () => {};
globalThis.location = {href: pathToFileURL(assets).href + '/'};
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.url = url;
  }
  send() {
    this.status = 200;
    const bytes = readFileSync(join(assets, this.url));
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  }
};
const Module = WebAssembly.Module;
WebAssembly.Module = function (bytes) {
  if (bytes[8] === 5) throw new Error('a probe for 64-bit memory: the engine at hand is the one of 32 bits');
  return new Module(bytes);
};

const {EngineBase} = await import(pathToFileURL(join(assets, 'engine.mjs')).href);
class Engine extends EngineBase {
  constructor(port) {
    super();
    this.port = port;
    port.onmessage = (message) => this.onRpcResponseBytes(message.data);
  }
  rpcSendRequestBytes(bytes) {
    this.port.postMessage(bytes);
  }
}

runInThisContext(readFileSync(join(assets, 'engine_bundle.node.js'), 'utf8'));
await new Promise((resolve) => setTimeout(resolve, 500)); // compiled and initialised: the loader says nothing when
const {port1, port2} = new MessageChannel();
self.onmessage({data: port1});
const engine = new Engine(port2);

async function answer(sql) {
  const result = await engine.query(sql);
  if (result.error()) throw new Error(`${sql}: ${result.error()}`);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(Object.fromEntries(result.columns().map((name) => [name, row.get(name)])));
  }
  return rows;
}

const answers = [];
for (const [trace, texts] of JSON.parse(readFileSync(0, 'utf8'))) {
  await engine.resetTraceProcessor({cropTrackEvents: false, ingestFtraceInRawTable: false});
  await engine.parse(new Uint8Array(readFileSync(trace)));
  await engine.notifyEof();
  const rows = [];
  for (const sql of texts) rows.push(await answer(sql));
  answers.push(rows);
}
process.stdout.write(JSON.stringify(answers, (_, value) => (typeof value === 'bigint' ? Number(value) : value)));
port1.close();
port2.close();
