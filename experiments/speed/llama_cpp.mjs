// llama.cpp behind lines of JSON: node llama_cpp.mjs NODE_MODULES MODEL.gguf THREADS CONTEXT LOOKUP
// A line {tokens, limit, stops} gives a line {tokens}: the greedy continuation, up to and with a stop token.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [modules, model, threads, contextSize, lookup] = process.argv.slice(2);
const {getLlama, InputLookupTokenPredictor} = await import(
    pathToFileURL(path.resolve(modules, "node-llama-cpp/dist/index.js")).href
);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const loaded = await llama.loadModel({modelPath: model});
const context = await loaded.createContext({contextSize: Number(contextSize), threads: Number(threads)});
const predictor = Number(lookup)
    ? {tokenPredictor: new InputLookupTokenPredictor({predictionLength: {max: Number(lookup)}})}
    : {};
const sequence = context.getSequence(predictor);
console.log(JSON.stringify({system: llama.systemInfo, type: loaded.typeDescription}));

for await (const line of readline.createInterface({input: process.stdin})) {
    const {tokens, limit, stops} = JSON.parse(line);
    await sequence.clearHistory();
    const written = [];
    for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        written.push(token);
        if (written.length >= limit || stops.includes(token)) break;
    }
    console.log(JSON.stringify({tokens: written}));
}
